// The package's worker in a browser without the origin private file system.
import './no-files.js';
import '/pkg/dist/worker.js';
