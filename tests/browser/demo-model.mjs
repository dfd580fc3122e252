// The demo model, the real one: on SwiftShader once and briefly, on lavapipe with every schedule, and through the page.

import assert from 'node:assert/strict';
import fs from 'node:fs';
import path from 'node:path';
import { blankPage, DEMO, newPage, record, ROOT, shoot, site, test } from './harness.mjs';
import { runRequests } from './golden.mjs';

const GREEDY = JSON.parse(fs.readFileSync(path.join(ROOT, 'tests', 'data', 'smollm2', 'greedy.json'), 'utf8'));
const SCHEDULES = ['autoregressive', 'two-call', 'two-call-seed', 'packed', 'anchored'];
const TOKENS = 32;

test('demo model: SwiftShader, f32: a few tokens of a short prompt', async () => {
  const [{ prompt_ids: ids }] = GREEDY;
  const prompt = { tokens: ids.slice(0, 12) };
  const page = await blankPage('stock');
  const { info, results } = await runRequests(page, DEMO, { contextLength: 128 }, [[prompt, { maxTokens: 6, schedule: 'packed' }]]);
  assert.equal(info.shaderF16, false);
  assert.equal(results[0].tokens.length, 6);
  // The same prompt on the adapter with f16 and subgroups: other kernels, same ids.
  const other = await runRequests(await blankPage('lavapipe'), DEMO, { contextLength: 128 }, [[prompt, { maxTokens: 6 }]]);
  assert.deepEqual(results[0].tokens, other.results[0].tokens);
  assert.match(results[0].text, /\w/);
}, { seconds: 600 });

test('demo model: lavapipe, f16 and subgroups: every schedule, abort, again, dispose', async () => {
  const { message, prompt_ids: ids, greedy_ids: greedy } = GREEDY[0];
  const page = await blankPage('lavapipe');
  const outcome = await page.evaluate(
    async ({ source, ids, message, schedules, count }) => {
      const { load } = await import('/pkg/dist/index.js');
      const imported = performance.now();
      const model = await load(source, { backend: 'webgpu', contextLength: 512 });
      const loaded = performance.now();
      const first = await model.generate({ tokens: ids }, { maxTokens: count }).result;
      const results = [];
      for (const schedule of schedules) results.push(await model.generate({ tokens: ids }, { maxTokens: count, schedule, cachePrompt: false }).result);

      const stop = new AbortController();
      let seen = 0;
      const generation = model.generate({ tokens: ids }, { maxTokens: count, schedule: 'packed', signal: stop.signal });
      const error = await (async () => {
        for await (const part of generation) {
          seen = part.calls;
          if (seen === 4) stop.abort();
        }
      })().catch(({ code, partial }) => ({ code, partial }));
      const again = await model.generate({ tokens: ids }, { maxTokens: count, schedule: 'packed' }).result;
      const chat = await model.generate([{ role: 'user', content: message }], { maxTokens: count }).result;
      await model.dispose();
      const after = await model.generate({ tokens: ids }).result.catch(({ code }) => code);
      return { info: model.info, times: { imported, loaded, total: loaded + first.timings.firstToken }, first, results, error, again, chat, after };
    },
    { source: DEMO, ids, message, schedules: SCHEDULES, count: TOKENS },
  );
  const { info, times, results, error, again, chat, after } = outcome;
  assert.deepEqual([info.backend, info.shaderF16, info.subgroups], ['webgpu', true, true]);
  assert.deepEqual([info.engine.device.shader_f16, info.engine.device.subgroups], [true, true]);
  for (const [i, schedule] of SCHEDULES.entries()) {
    assert.equal(results[i].schedule, schedule);
    assert.deepEqual(results[i].tokens, results[0].tokens, `${schedule} differs from autoregressive`);
    assert.equal(results[i].text, results[0].text);
  }
  assert.deepEqual(results[0].tokens, greedy.slice(0, TOKENS), 'the text is not the reference\'s');
  const packed = results[SCHEDULES.indexOf('packed')];
  assert.ok(packed.accepted > 0 && packed.calls < TOKENS - 1, `packed took ${packed.calls} calls`);
  assert.equal(error?.code, 'Aborted');
  assert.ok(error.partial.calls <= 6, `stopped after ${error.partial.calls} calls`);
  assert.deepEqual(error.partial.tokens, packed.tokens.slice(0, error.partial.tokens.length));
  assert.deepEqual(again.tokens, packed.tokens);
  assert.deepEqual(chat.tokens, results[0].tokens, 'the chat template makes another prompt');
  assert.equal(after, 'Aborted');
  record('first-token.json', {
    what: 'milliseconds from navigation to the first token, demo model, lavapipe on two cores',
    ...times,
    phases: { importPackage: times.imported, ...info.timings, firstToken: outcome.first.timings.firstToken },
    schedules: Object.fromEntries(SCHEDULES.map((name, i) => [name, { calls: results[i].calls, rows: results[i].rows, tokensPerCall: results[i].tokensPerCall, decodeMs: results[i].timings.decode }])),
  });
}, { seconds: 600 });

test('demo model: a browser without a GPU takes the CPU, says so, and can be stopped', async () => {
  const { prompt_ids: ids, greedy_ids: greedy } = GREEDY[0];
  const page = await blankPage('flagless');
  const outcome = await page.evaluate(
    async ({ source, ids, message, schedules, count }) => {
      const { load } = await import('/pkg/dist/index.js');
      const model = await load(source, { contextLength: 512 });
      const results = [];
      for (const schedule of schedules) results.push(await model.generate({ tokens: ids }, { maxTokens: count, schedule, cachePrompt: false }).result);
      const stop = new AbortController();
      const error = await (async () => {
        for await (const part of model.generate({ tokens: ids }, { maxTokens: 400, ignoreEos: true, signal: stop.signal })) if (part.calls === 3) stop.abort();
      })().catch(({ code, partial }) => ({ code, calls: partial.calls }));
      const again = await model.generate({ tokens: ids }, { maxTokens: count }).result;
      const chat = [{ role: 'user', content: message }];
      const { text } = await model.generate(chat, { maxTokens: count }).result;
      const turn = [...chat, { role: 'assistant', content: text }, { role: 'user', content: 'And then?' }];
      const next = await model.generate(turn, { maxTokens: count }).result;
      const anew = await model.generate(turn, { maxTokens: count, cachePrompt: false }).result;
      await model.dispose();
      return { info: model.info, results, error, again, next, anew };
    },
    { source: DEMO, ids, message: GREEDY[0].message, schedules: SCHEDULES, count: TOKENS },
  );
  assert.equal(outcome.info.backend, 'cpu');
  assert.match(outcome.info.backendReason, /found no GPU/);
  for (const [i, schedule] of SCHEDULES.entries()) assert.deepEqual(outcome.results[i].tokens, greedy.slice(0, TOKENS), schedule);
  assert.equal(outcome.error?.code, 'Aborted');
  assert.ok(outcome.error.calls <= 6, `stopped after ${outcome.error.calls} calls`);
  assert.deepEqual(outcome.again.tokens, greedy.slice(0, TOKENS));
  const { next, anew } = outcome;
  assert.ok(next.prefill.cached >= ids.length && next.prefill.rows <= next.promptTokens - next.prefill.cached + 20, `${next.prefill.cached} of ${next.promptTokens} tokens were not computed again`);
  assert.equal(anew.prefill.cached, 0);
  assert.deepEqual(next.tokens, anew.tokens, 'the next turn of a chat depends on what was in the cache');
  record('cpu-in-browser.json', Object.fromEntries(SCHEDULES.map((name, i) => [name, { calls: outcome.results[i].calls, prefillMs: outcome.results[i].timings.prefill, decodeMs: outcome.results[i].timings.decode }])));
}, { seconds: 600 });

test('demo model: on the CPU, with a context of 2048, less than 300 MB of WebAssembly memory', async () => {
  const ids = GREEDY.flatMap(({ prompt_ids: ids, greedy_ids: greedy }) => [...ids, ...greedy]);
  const prompt = Array.from({ length: 1100 }, (_, i) => ids[i % ids.length]);
  const page = await blankPage('flagless');
  const outcome = await page.evaluate(
    async ({ source, prompt, schedules }) => {
      const { load } = await import('/pkg/dist/index.js');
      const channel = new BroadcastChannel('wasm-memory');
      const memory = () =>
        new Promise((resolve) => {
          channel.onmessage = ({ data }) => resolve(data.reduce((sum, bytes) => sum + bytes, 0));
          channel.postMessage('ask');
        });
      const model = await load(source, { backend: 'cpu', contextLength: 2048, workerUrl: '/tests/browser/memory-worker.js' });
      const bytes = { loaded: await memory() };
      for (const schedule of schedules) await model.generate({ tokens: prompt }, { maxTokens: 8, schedule, cachePrompt: false }).result;
      bytes.generated = await memory();
      await model.dispose();
      return { bytes, info: model.info };
    },
    { source: DEMO, prompt, schedules: ['autoregressive', 'quadratic'] },
  );
  const { bytes, info } = outcome;
  record('cpu-memory.json', { bytes, memory: info.memory });
  assert.deepEqual([info.backend, info.precision, info.contextLength], ['cpu', 'f16', 2048]);
  // Control: what is counted holds at least the weights and the cache.
  assert.ok(bytes.loaded > info.memory.weights + info.memory.cache, JSON.stringify(bytes));
  assert.ok(bytes.generated < 300e6, `${JSON.stringify(bytes)} bytes of WebAssembly memory`);
}, { seconds: 600 });

test('demo model: the page loads it, answers, compares', async () => {
  const page = await newPage('lavapipe', { viewport: { width: 1200, height: 900 } });
  await page.goto(`${await site()}?context=512&backend=webgpu`);
  await page.waitForSelector('#load:not(:disabled)');
  await page.click('#load');
  await page.waitForSelector('#generate:not(:disabled)', { timeout: 120_000 });
  await page.fill('#max-tokens', '40');
  await page.selectOption('#compare', 'autoregressive');
  await page.click('#generate');
  await page.waitForSelector('#verdict:not([hidden])', { timeout: 120_000 });
  await shoot(page, 'demo-model');
  assert.match(await page.textContent('#verdict'), /Texts identical: yes/);
  const [packed, plain] = await page.locator('.panel .text').allTextContents();
  assert.equal(packed, plain);
  assert.ok(packed.length > 60, packed);
  assert.ok((await page.locator('.panel mark').count()) > 0, 'no accepted draft is marked');
  assert.deepEqual(page.errors, []);
}, { seconds: 600 });
