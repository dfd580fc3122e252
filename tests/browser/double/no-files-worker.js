// The double in a browser without the origin private file system.
import '../no-files.js';
import './worker.js';
