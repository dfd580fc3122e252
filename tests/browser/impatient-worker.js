// The package's worker, whose patience with a silent connection is short.
import './impatient.js';
import '/pkg/dist/worker.js';
