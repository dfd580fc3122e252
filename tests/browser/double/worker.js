// The package's own worker code, with the double where the wasm module would be.
import { serve } from '/pkg/dist/serve.js';
import { startDouble } from './engine.js';

serve(globalThis, async () => startDouble());
