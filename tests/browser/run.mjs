// Tests of the npm package, the demo page and the wasm module in headless Chromium.
//
//   node tests/browser/run.mjs [part of a test's name]
//
// Needs what `npm test` sets up: the built package, the demo model, both Chromiums. Nothing is skipped where a piece is
// missing, WebGPU least of all: the test fails.

import { runAll } from './harness.mjs';
import './package.mjs';
import './facade.mjs';
import './page.mjs';
import './golden.mjs';
import './numbers.mjs';
import './loading.mjs';
import './bundlers.mjs';
import './demo-model.mjs';

const filter = process.argv[2] ?? '';
const { passed, failed } = await runAll(filter);
console.log(`\n${passed} passed, ${failed} failed`);
if (passed + failed === 0) console.log(`no test's name contains "${filter}"`);
process.exit(failed === 0 && passed > 0 ? 0 : 1);
