// The package's worker in a browser of 2023.
import './older.js';
import '/pkg/dist/worker.js';
