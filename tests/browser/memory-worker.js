// The package's worker, and how much WebAssembly memory it holds.
import './memory.js';
import '/pkg/dist/worker.js';
