// What a call of the demo model costs against its rows in Chromium, through the real wasm module:
//
//   node benches/browser_rows.mjs [--browser lavapipe|stock] [--backend webgpu|cpu] [--rows 1,2,4] [--rounds 3] [--model PATH]
//
// Needs what `npm start` builds. `target/release/forecall bench` is the same measurement natively.

import { parseArgs } from 'node:util';
import { blankPage, closeAll } from '../tests/browser/harness.mjs';

const { values } = parseArgs({
  options: {
    browser: { type: 'string', default: 'lavapipe' },
    backend: { type: 'string', default: 'webgpu' },
    rows: { type: 'string', default: '1,2,4,8,16,32,64' },
    rounds: { type: 'string', default: '3' },
    model: { type: 'string', default: '/models/smollm2-135m-instruct/' },
  },
});

const page = await blankPage(values.browser);
const table = await page.evaluate(
  async ({ model, backend, rows, rounds, cure }) => {
    // See there what ails the driver.
    if (cure) await import('/tests/browser/storage-params.js');
    const [{ default: init, load }, { getter }, { chooseBackend }] = await Promise.all([
      import('/pkg/wasm/forecall.js'),
      import('/pkg/dist/transport.js'),
      import('/pkg/dist/device.js'),
    ]);
    const choice = await chooseBackend(backend, () => {});
    await init({ module_or_path: '/pkg/wasm/forecall_bg.wasm' });
    const source = { kind: 'remote', location: new URL(model, location.href).href, revision: null, hubUrl: null, headers: {} };
    const options = { source, drafter: 'auto', precision: 'auto', quantize: null, contextLength: 2048, backend, adapter: choice.adapter, store: false, limits: choice.limits, quota: null };
    const get = getter((url, init) => fetch(url, init), new AbortController().signal);
    const io = { get, sleep: (ms) => new Promise((resolve) => setTimeout(resolve, ms)) };
    const loaded = await load(JSON.stringify(options), io, () => true);
    const measured = JSON.parse(await loaded.measure(Uint32Array.from(rows), rounds));
    loaded.dispose();
    return measured;
  },
  { model: values.model, backend: values.backend, rows: values.rows.split(',').map(Number), rounds: Number(values.rounds), cure: values.browser === 'lavapipe' },
);
console.log(`${values.browser} Chromium, ${table.backend}; work per call: ${JSON.stringify(table.work)}`);
console.log('rows   min ms   ratio   GB/s   GFLOP/s');
const best = table.calls[0]?.min_ms ?? 1;
for (const { rows, min_ms: ms } of table.calls) {
  const scale = (value) => value * (table.calls.find((call) => call.rows === rows)?.median_ms ?? ms);
  const call = table.calls.find((entry) => entry.rows === rows);
  console.log(`${String(rows).padStart(4)} ${ms.toFixed(1).padStart(8)} ${(ms / best).toFixed(2).padStart(7)} ${(scale(call.gb_per_s) / ms).toFixed(2).padStart(6)} ${(scale(call.gflop_per_s) / ms).toFixed(2).padStart(9)}`);
}
await closeAll();
