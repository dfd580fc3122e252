// The tiny golden checkpoints through the real wasm module: every schedule gives the reference's greedy ids, and block diffusion
// the record's, on the adapter without 16-bit floats (SwiftShader) and on the one that has them (lavapipe).

import assert from 'node:assert/strict';
import fs from 'node:fs';
import path from 'node:path';
import { blankPage, ROOT, test } from './harness.mjs';

const GOLDEN = path.join(ROOT, 'tests', 'golden');
// The families' checkpoints are judged natively, where they take seconds; these four differ in how they are stored.
const CHECKPOINTS = ['tiny-llama', 'tiny-llama-tied', 'tiny-llama-q4', 'tiny-llama-q8-bf16'];
const SCHEDULES = ['autoregressive', 'two-call', 'two-call-seed', 'packed', 'anchored', 'quadratic'];
/** The checkpoint whose drafts are accepted runs every schedule; each new width of call is a kernel to compile. */
const FEW = ['autoregressive', 'two-call', 'packed'];
/** A choice closer than this may fall either way where values are stored in 16 bits. */
const CLOSE = { f32: 1e-4, auto: 2e-2 };

/** Loads a checkpoint in a page and runs the requests on it, one after the other. */
export async function runRequests(page, source, options, requests) {
  return page.evaluate(
    async ({ source, options, requests }) => {
      const { load } = await import('/pkg/dist/index.js');
      const model = await load(source, { backend: 'webgpu', ...options });
      const results = [];
      for (const [prompt, request] of requests) results.push(await model.generate(prompt, { cachePrompt: false, ...request }).result);
      await model.dispose();
      return { info: model.info, results };
    },
    { source, options, requests },
  );
}

// Block diffusion's three layouts: aligned blocks, blocks whose kept rows are causal, a sliding window. Single precision, so
// that a record's text is the text, on both adapters; texts with their own block length and threshold are among them.
for (const [name, browser, backend] of [
  ['tiny-sdar-trained', 'flagless', 'cpu'],
  ['tiny-nemotron-trained', 'lavapipe', 'webgpu'],
  ['tiny-setdlm-trained', 'lavapipe', 'webgpu'],
  ['tiny-setdlm-trained', 'stock', 'webgpu'],
]) {
  test(`golden: ${name}, ${backend === 'cpu' ? 'CPU' : browser}: block diffusion gives the record's ids, and its options arrive`, async () => {
    const { texts } = JSON.parse(fs.readFileSync(path.join(GOLDEN, name, 'diffusion.json'), 'utf8'));
    const clear = texts.filter((text) => text.smallest_logit_gap > CLOSE.f32 && text.smallest_probability_gap > CLOSE.f32);
    assert.ok(clear.length > 1 && clear.some((text) => text.threshold !== null), 'too few texts are clear enough');
    const page = await blankPage(browser);
    const option = (value) => value ?? undefined;
    const requests = clear.map(({ prompt, tokens, block_length: blockLength, threshold, steps }) => [
      { tokens: prompt },
      { maxTokens: tokens.length, ignoreEos: true, schedule: 'block-diffusion', blockLength: option(blockLength), threshold: option(threshold), steps: option(steps) },
    ]);
    // Control: where nothing reaches the threshold, every call gives one token.
    requests.push([requests[0][0], { ...requests[0][1], threshold: 1.5 }]);
    const { info, results } = await runRequests(page, `/tests/golden/${name}/`, { precision: 'f32', backend }, requests);
    assert.equal(info.backend, backend);
    if (name === 'tiny-sdar-trained') assert.equal(info.defaultSchedule, 'block-diffusion');
    for (const [i, { tokens }] of clear.entries()) assert.deepEqual(results[i].tokens, tokens);
    assert.ok(results[0].calls < results[0].tokens.length, 'several tokens a call');
    assert.ok(results.at(-1).calls > results[0].calls, 'the threshold arrives');
    assert.deepEqual(page.errors, []);
  }, { seconds: 180 });
}

for (const [browser, precision, backend] of [['stock', 'f32', 'webgpu'], ['lavapipe', 'auto', 'webgpu'], ['flagless', 'auto', 'cpu']]) {
  for (const name of CHECKPOINTS) {
    test(`golden: ${name}, ${backend === 'cpu' ? 'CPU' : browser}, precision ${precision}: every schedule gives the reference's ids`, async () => {
      const golden = JSON.parse(fs.readFileSync(path.join(GOLDEN, name, 'golden.json'), 'utf8'));
      const schedules = name === 'tiny-llama-tied' ? SCHEDULES : FEW;
      const wanted = golden.greedy.filter((text) => text.smallest_top2_gap > CLOSE[precision]).slice(0, 2);
      assert.ok(wanted.length > 0, 'no golden text is clear enough');
      const page = await blankPage(browser);
      const requests = wanted.flatMap(({ prompt, tokens }) =>
        schedules.map((schedule) => [{ tokens: prompt }, { schedule, maxTokens: tokens.length, ignoreEos: true, ...(schedule !== 'autoregressive' && { verifyWidth: golden.verify_width, draftWidth: golden.draft_width }) }]),
      );
      const { info, results } = await runRequests(page, `/tests/golden/${name}/`, { precision, backend }, requests);
      assert.equal(info.backend, backend);
      assert.equal(info.shaderF16 && info.subgroups, browser === 'lavapipe', JSON.stringify(info.engine.device));
      for (const [i, { prompt, tokens, packed, two_call: twoCall }] of wanted.entries()) {
        for (const [j, schedule] of schedules.entries()) {
          const result = results[i * schedules.length + j];
          assert.deepEqual(result.tokens, tokens, `${schedule} after a prompt of ${prompt.length}`);
          assert.equal(result.finishReason, 'length');
          const reference = { packed, 'two-call': twoCall }[schedule];
          // Drafts are chosen by close calls of their own, so the counts are compared where arithmetic is 32-bit.
          if (reference && precision === 'f32') assert.equal(result.calls, reference.calls, `calls of ${schedule}`);
        }
      }
      const autoregressive = results.filter((result) => result.schedule === 'autoregressive');
      for (const result of autoregressive) assert.equal(result.calls, result.tokens.length - 1);
      assert.deepEqual(page.errors, []);
    }, { seconds: 180 });
  }
}

test('golden: the kernels for real GPUs pass the browser\'s shader compiler too, and give the same ids', async () => {
  const golden = JSON.parse(fs.readFileSync(path.join(GOLDEN, 'tiny-llama-q4', 'golden.json'), 'utf8'));
  const text = golden.greedy.find((text) => text.smallest_top2_gap > CLOSE.auto);
  const page = await blankPage('lavapipe');
  const requests = ['autoregressive', 'packed'].map((schedule) => [{ tokens: text.prompt }, { schedule, maxTokens: 24, ignoreEos: true }]);
  const { info, results } = await runRequests(page, '/tests/golden/tiny-llama-q4/', { workerUrl: '/tests/browser/hardware-worker.js' }, requests);
  assert.equal(info.engine.device.type, 'unknown', 'the adapter was still taken for a software one');
  for (const result of results) assert.deepEqual(result.tokens, text.tokens.slice(0, 24));
}, { seconds: 120 });

test('golden: drafts are accepted in the browser, and an end id inside an accepted run cuts there', async () => {
  const golden = JSON.parse(fs.readFileSync(path.join(GOLDEN, 'tiny-llama-tied', 'golden.json'), 'utf8'));
  const text = golden.greedy.find((text) => text.first_end !== null) ?? golden.greedy[0];
  const page = await blankPage('stock');
  const requests = ['autoregressive', 'packed'].map((schedule) => [{ tokens: text.prompt }, { schedule, maxTokens: 48 }]);
  const { results: [plain, packed] } = await runRequests(page, '/tests/golden/tiny-llama-tied/', { precision: 'f32' }, requests);
  assert.deepEqual(packed.tokens, plain.tokens);
  assert.equal(packed.finishReason, plain.finishReason);
  const end = text.first_end;
  assert.deepEqual(plain.tokens, end === null ? text.tokens : text.tokens.slice(0, end + 1));
  assert.ok(packed.accepted > 0, 'no draft was accepted');
  assert.ok(packed.calls < plain.calls);
}, { seconds: 120 });

test('golden: requests that do not fit are refused, and the model goes on', async () => {
  const page = await blankPage('stock');
  const outcomes = await page.evaluate(async () => {
    const { load } = await import('/pkg/dist/index.js');
    const caught = (promise) => promise.then((value) => ({ value }), ({ code, message, option }) => ({ code, message, option }));
    const source = '/tests/golden/tiny-llama/';
    const model = await load(source, { backend: 'webgpu', precision: 'f32', contextLength: 64 });
    const outcomes = {
      id: await caught(model.generate({ tokens: [1, 99_999] }).result),
      long: await caught(model.generate({ tokens: Array.from({ length: 65 }, () => 7) }).result),
      empty: await caught(model.generate({ tokens: [] }).result),
      text: await caught(model.generate('text without a tokenizer').result),
      messages: await caught(model.generate([{ role: 'user', content: 'hello' }]).result),
      width: await caught(model.generate({ tokens: [1, 2, 3] }, { verifyWidth: 100_000 }).result),
      schedule: await caught(model.generate({ tokens: [1, 2, 3] }, { schedule: 'block-diffusion' }).result),
      threshold: await caught(model.generate({ tokens: [1, 2, 3] }, { schedule: 'packed', threshold: 0.5 }).result),
      context: await caught(load(source, { backend: 'webgpu', contextLength: 10_000_000 })),
      missing: await caught(load('/tests/golden/nothing/', { backend: 'webgpu' })),
      adapter: await caught(load(source, { backend: 'webgpu', adapter: '/tests/golden/tiny-llama/' })),
    };
    outcomes.full = await caught(model.generate({ tokens: Array.from({ length: 60 }, (_, i) => i) }, { maxTokens: 50, ignoreEos: true }).result);
    outcomes.after = await caught(model.generate({ tokens: [1, 2, 3] }, { maxTokens: 4, ignoreEos: true }).result);
    outcomes.typed = [];
    for (const Ids of [Uint32Array, Int32Array, Uint16Array]) outcomes.typed.push((await model.generate({ tokens: Ids.of(1, 2, 3) }, { maxTokens: 4, ignoreEos: true }).result).tokens);
    await model.dispose();
    outcomes.warnings = {};
    for (const name of ['tiny-llama', 'tiny-llama-q4']) {
      const heard = (outcomes.warnings[name] = []);
      await (await load(`/tests/golden/${name}/`, { backend: 'cpu', quantize: 'q4', store: false, onWarning: ({ code, message }) => heard.push(code, message) })).dispose();
    }
    return outcomes;
  });
  const codes = { id: 'InvalidOption', long: 'InvalidOption', empty: 'InvalidOption', text: 'BadTokenizer', messages: 'BadTokenizer', width: 'InvalidOption', schedule: 'InvalidOption', threshold: 'InvalidOption', context: 'InvalidOption' };
  const options = { id: 'prompt', long: 'prompt', empty: 'prompt', text: undefined, width: 'verifyWidth', schedule: 'schedule', threshold: 'threshold', context: 'contextLength' };
  for (const [name, option] of Object.entries(options)) assert.equal(outcomes[name].option, option, `${name}: ${JSON.stringify(outcomes[name])}`);
  for (const [name, code] of Object.entries(codes)) assert.equal(outcomes[name].code, code, `${name}: ${JSON.stringify(outcomes[name])}`);
  assert.match(outcomes.id.message, /99999/);
  assert.match(outcomes.long.message, /6[45]/);
  assert.match(outcomes.missing.message, /config\.json/);
  assert.ok(outcomes.adapter.code, 'a folder without an adapter was taken for one');
  assert.equal(outcomes.full.value?.finishReason, 'context', JSON.stringify(outcomes.full));
  assert.equal(outcomes.after.value?.tokens.length, 4, JSON.stringify(outcomes.after));
  assert.deepEqual(outcomes.typed, Array(3).fill(outcomes.after.value.tokens), 'typed arrays are tokens too');
  assert.deepEqual(outcomes.warnings['tiny-llama'], []);
  assert.match(outcomes.warnings['tiny-llama-q4'].join(': '), /^quantized-already: .*stays as it is/);
}, { seconds: 120 });

test('golden: truncated weights and a broken config are typed errors, with nothing left half-loaded', async () => {
  const page = await blankPage('stock');
  const folder = '/tests/golden/tiny-llama/';
  const file = (name) => fs.readFileSync(path.join(GOLDEN, 'tiny-llama', name));
  const files = { 'short/config.json': file('config.json'), 'short/model.safetensors': file('model.safetensors').subarray(0, 40_000), 'broken/config.json': Buffer.from('{"model_type": "llama"'), 'odd/config.json': Buffer.from('{"model_type": "mystery"}') };
  await page.route('**/bad/**', (route) => {
    const body = files[new URL(route.request().url()).pathname.replace('/bad/', '')];
    return body ? route.fulfill({ status: 200, body, contentType: 'application/octet-stream', headers: { 'content-length': String(body.length) } }) : route.fulfill({ status: 404 });
  });
  const outcomes = await page.evaluate(async (folder) => {
    const { load } = await import('/pkg/dist/index.js');
    const caught = (promise) => promise.then(() => ({}), ({ code, message }) => ({ code, message }));
    const outcomes = {};
    for (const name of ['short', 'broken', 'odd']) outcomes[name] = await caught(load(`/bad/${name}/`, { backend: 'webgpu' }));
    const model = await load(folder, { backend: 'webgpu' });
    outcomes.after = (await model.generate({ tokens: [1, 2, 3] }, { maxTokens: 3, ignoreEos: true }).result).tokens.length;
    return outcomes;
  }, folder);
  assert.equal(outcomes.short.code, 'BadWeights', JSON.stringify(outcomes.short));
  assert.match(outcomes.short.message, /model\.safetensors/);
  assert.equal(outcomes.broken.code, 'BadConfig', JSON.stringify(outcomes.broken));
  assert.equal(outcomes.odd.code, 'Unsupported', JSON.stringify(outcomes.odd));
  assert.match(outcomes.odd.message, /mystery/);
  assert.equal(outcomes.after, 3);
}, { seconds: 120 });

test('golden: browsers of 2023, whose adapters have no `info` and refuse limits that they do not know', async () => {
  const golden = JSON.parse(fs.readFileSync(path.join(GOLDEN, 'tiny-llama-tied', 'golden.json'), 'utf8'));
  const { prompt, tokens } = golden.greedy.find((text) => text.smallest_top2_gap > CLOSE.f32);
  const page = await blankPage('lavapipe');
  await page.addScriptTag({ url: '/tests/browser/older.js', type: 'module' });
  // Controls: this is such a browser.
  const lacks = await page.evaluate(async () => {
    const adapter = await navigator.gpu.requestAdapter();
    const refused = await adapter.requestDevice({ requiredLimits: { maxBindGroupsPlusVertexBuffers: 8 } }).catch(({ name }) => name);
    return [adapter.info, URL.canParse, refused];
  });
  assert.deepEqual(lacks, [undefined, undefined, 'OperationError']);
  const { device, reason, backend } = await page.evaluate(async () => (await import('/pkg/dist/index.js')).availability());
  assert.deepEqual([device.adapter, device.subgroupMinSize, backend], [{ vendor: '', architecture: '', device: '', description: '', fallback: true }, null, 'cpu']);
  assert.match(reason, /in software only/);
  const { info, results } = await runRequests(page, '/tests/golden/tiny-llama-tied/', { precision: 'f32', adapter: 'none', workerUrl: '/tests/browser/older-worker.js' }, [[{ tokens: prompt }, { maxTokens: tokens.length, ignoreEos: true }]]);
  assert.equal(info.backend, 'webgpu');
  assert.deepEqual(results[0].tokens, tokens);
  const asked = await page.evaluate(async () => {
    GPUAdapter.prototype.requestAdapterInfo = async () => ({ vendor: 'someone', architecture: 'some', device: '', description: 'a GPU' });
    return (await (await import('/pkg/dist/index.js')).availability()).device.adapter;
  });
  assert.deepEqual(asked, { vendor: 'someone', architecture: 'some', device: '', description: 'a GPU', fallback: true });
  assert.deepEqual(page.errors, []);
}, { seconds: 180 });

test('golden: `auto` takes the CPU where the GPU is software, and says why; the GPU where it is one', async () => {
  for (const [browser, worker, backend, why] of [['stock', undefined, 'cpu', /WebGPU adapter is a software one/], ['lavapipe', '/tests/browser/hardware-worker.js', 'webgpu', /there is a GPU/]]) {
    const page = await blankPage(browser);
    const options = { backend: 'auto', adapter: 'none', workerUrl: worker };
    const { info } = await runRequests(page, '/tests/golden/tiny-llama-tied/', options, []);
    assert.deepEqual([info.backend, info.engine.backend], [backend, backend], info.backendReason);
    assert.match(info.backendReason, why);
    // The page itself cannot know: its adapter says that it is software in both.
    const [alone, looked] = await page.evaluate(async (options) => {
      const { availability } = await import('/pkg/dist/index.js');
      return [await availability(), await availability('/tests/golden/tiny-llama-tied/', options)];
    }, options);
    assert.deepEqual([alone.backend, looked.available, looked.backend, looked.reason === null], ['cpu', true, backend, backend === 'webgpu']);
    assert.deepEqual(page.errors, []);
  }
}, { seconds: 120 });
