// The package's worker in a browser whose software adapter does not say that it is one, so that the kernels for real GPUs
// are chosen.
import './no-fallback.js';
import '/pkg/dist/worker.js';
