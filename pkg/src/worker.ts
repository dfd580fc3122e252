// The worker: the engine's wasm module behind `serve`.

import { startEngine } from './wasm.js';
import { serve, type WorkerScope } from './serve.js';

serve(globalThis as unknown as WorkerScope, startEngine);
