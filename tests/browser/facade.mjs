// Façade, worker and byte source in a browser, with the double where the wasm module would be.

import assert from 'node:assert/strict';
import fs from 'node:fs';
import http from 'node:http';
import path from 'node:path';
import { blankPage, ROOT, site, test } from './harness.mjs';

const TINY = '/tests/golden/tiny-llama-tied/';

/**
 * Runs `body` in a page, with `load` set to load the tiny checkpoint into the double. What `body` throws comes back as
 * `{ error }` with its fields.
 */
async function inPage(body, argument, browser = 'stock') {
  const page = await blankPage(browser);
  const result = await page.evaluate(
    async ({ source, argument, tiny }) => {
      const forecall = await import('/pkg/dist/index.js');
      const load = (options = {}, from = tiny) => forecall.load(from, { backend: 'cpu', workerUrl: '/tests/browser/double/worker.js', ...options });
      const plain = (error) => ({ isOurs: error instanceof forecall.ForecallError, ...error, name: error.name, code: error.code, message: error.message });
      const caught = (promise) => promise.then((value) => ({ value }), (error) => ({ error: plain(error) }));
      try {
        return await (0, eval)(`(${source})`)({ ...forecall, load, caught, argument });
      } catch (error) {
        return { error: plain(error), stack: error.stack };
      }
    },
    { source: String(body), argument, tiny: TINY },
  );
  assert.deepEqual(page.errors, []);
  return result;
}

function expectError(outcome, code, about) {
  assert.ok(outcome?.error, `no error, but ${JSON.stringify(outcome)}`);
  assert.equal(outcome.error.code, code, outcome.error.message);
  assert.equal(outcome.error.isOurs, true);
  assert.match(outcome.error.message, about);
}

test('façade: parts join to the text, counts add up, progress goes forward', async () => {
  const { parts, result, info, progress } = await inPage(async ({ load }) => {
    const progress = [];
    const model = await load({ onProgress: (p) => progress.push({ ...p }) });
    const generation = model.generate('tell me');
    const parts = [];
    for await (const part of generation) parts.push(part);
    const result = await generation.result;
    await model.dispose();
    await model.dispose();
    return { parts, result, info: model.info, progress };
  });
  assert.equal(parts.map((part) => part.text).join(''), result.text);
  assert.equal(parts.flatMap((part) => part.pieces).map((piece) => piece.text).join(''), result.text);
  assert.deepEqual(parts.flatMap((part) => part.tokens), result.tokens);
  const total = (key) => parts.reduce((sum, part) => sum + part[key], 0);
  assert.deepEqual([total('drafted'), total('accepted'), parts.at(-1).calls], [result.drafted, result.accepted, result.calls]);
  assert.ok(result.accepted > 0 && result.timings.firstToken > 0 && result.timings.total >= result.timings.firstToken);
  assert.equal(info.backend, 'cpu');
  assert.equal(info.drafter !== null, true, 'the adapter beside the weights was not found');

  const phases = [...new Set(progress.map((p) => p.phase))];
  assert.deepEqual(phases, ['start', 'download', 'compile', 'ready']);
  for (const [i, p] of progress.entries()) {
    assert.ok(p.loadedBytes <= p.totalBytes, JSON.stringify(p));
    assert.ok(i === 0 || p.loadedBytes >= progress[i - 1].loadedBytes, 'loaded bytes went back');
  }
  const size = (file) => fs.statSync(path.join(ROOT, 'tests/golden/tiny-llama-tied', file)).size;
  assert.equal(progress.at(-1).loadedBytes, progress.at(-1).totalBytes);
  assert.ok(progress.at(-1).totalBytes >= size('config.json') + size('model.safetensors') + size('draft_adapter/adapter_config.json'));
});

test('façade: a generation is a ReadableStream, and leaving it stops it', async () => {
  const { streamed, whole, left, after } = await inPage(async ({ load }) => {
    const model = await load();
    const whole = (await model.generate('tell me').result).text;
    let streamed = '';
    const text = new TransformStream({ transform: (part, out) => out.enqueue(part.text) });
    const reader = model.generate('tell me').pipeThrough(text).getReader();
    for (let next = await reader.read(); !next.done; next = await reader.read()) streamed += next.value;
    const generation = model.generate('tell me');
    let seen = 0;
    for await (const part of generation) if ((seen += part.tokens.length) > 4) break;
    const left = await generation.result;
    const after = (await model.generate('tell me').result).text;
    return { streamed, whole, left, after };
  });
  assert.equal(streamed, whole);
  assert.equal(left.finishReason, 'aborted');
  assert.ok(left.tokens.length < 20 && whole.startsWith(left.text), left.text);
  assert.equal(after, whole);
});

test('façade: a signal stops within the running call, and the next generation is as from a fresh model', async () => {
  const { outcome, callsAtAbort, after, fresh, early } = await inPage(async ({ load, caught }) => {
    const model = await load();
    const stop = new AbortController();
    const generation = model.generate('tell me', { signal: stop.signal });
    let callsAtAbort;
    const iterated = caught(
      (async () => {
        for await (const part of generation) {
          if (part.calls === 3) {
            callsAtAbort = part.calls;
            stop.abort();
          }
        }
      })(),
    );
    const outcome = { iterated: await iterated, result: await caught(generation.result) };
    const after = (await model.generate('tell me').result).text;
    const early = await caught(model.generate('tell me', { signal: AbortSignal.abort() }).result);
    const fresh = (await (await load()).generate('tell me').result).text;
    return { outcome, callsAtAbort, after, fresh, early };
  });
  expectError(outcome.iterated, 'Aborted', /signal/);
  expectError(outcome.result, 'Aborted', /signal/);
  expectError(early, 'Aborted', /before it began/);
  const { partial } = outcome.result.error;
  assert.ok(partial.calls >= callsAtAbort && partial.calls <= callsAtAbort + 2, `stopped after ${partial.calls} calls`);
  assert.ok(fresh.startsWith(partial.text));
  assert.equal(after, fresh);
});

test('façade: one generation at a time', async () => {
  const { second, first, third } = await inPage(async ({ load, caught }) => {
    const model = await load();
    const running = model.generate('tell me').result;
    const second = await caught(model.generate('me too').result);
    const first = await running;
    const third = await caught(model.generate('now me').result);
    return { second, first, third };
  });
  expectError(second, 'Busy', /running/);
  assert.equal(third.value.text, first.text);
});

for (const [prompt, code, about] of [
  ['panic please', 'Internal', /panicked: index out of bounds/],
  ['crash please', 'Internal', /engine stopped|crashed/],
]) {
  test(`façade: "${prompt}" ends every pending promise, and all later ones`, async () => {
    const { iterated, result, later, disposed } = await inPage(async ({ load, caught, argument }) => {
      const model = await load();
      const generation = model.generate(argument);
      const iterated = caught((async () => { for await (const part of generation) void part; })());
      const result = await caught(generation.result);
      const later = await caught(model.generate('tell me').result);
      const disposed = await caught(model.dispose());
      return { iterated: await iterated, result, later, disposed };
    }, prompt);
    for (const outcome of [iterated, result, later]) expectError(outcome, code, about);
    assert.ok('value' in disposed);
  });
}

test('façade: a lost device and a refused prompt are typed; the refused one leaves the model usable', async () => {
  const { lost, long, token, after } = await inPage(async ({ load, caught }) => {
    const model = await load();
    const long = await caught(model.generate('overlong prompt').result);
    const token = await caught(model.generate({ tokens: [4_000_000] }).result);
    const after = await caught(model.generate('tell me').result);
    const lost = await caught(model.generate('lose the device').result);
    return { lost, long, token, after };
  });
  expectError(long, 'InvalidOption', /9001 tokens/);
  expectError(token, 'InvalidOption', /below 257|below \d+/);
  assert.ok(after.value.text.length > 100);
  expectError(lost, 'DeviceLost', /lost/);
});

test('façade: options that are unknown or wrong are refused by name', async () => {
  const outcomes = await inPage(async ({ load, caught }) => {
    const model = await load();
    const tries = {
      temperature: model.generate('x', { temperature: 0.5 }).result,
      maxTokens: model.generate('x', { maxTokens: 0 }).result,
      schedule: model.generate('x', { schedule: 'fastest' }).result,
      verifyWidth: model.generate('x', { verifyWidth: 2.5 }).result,
      blockLength: model.generate('x', { blockLength: 0 }).result,
      threshold: model.generate('x', { threshold: -0.5 }).result,
      steps: model.generate('x', { steps: 1.5 }).result,
      stop: model.generate('x', { stop: ['', 'a'] }).result,
      ignoreEos: model.generate('x', { ignoreEos: 'yes' }).result,
      signal: model.generate('x', { signal: {} }).result,
      prompt: model.generate([{ role: 'user' }]).result,
      dtype: load({ dtype: 'q4' }),
      backend: load({ backend: 'cuda' }),
      precision: load({ precision: 'f64' }),
      contextLength: load({ contextLength: -1 }),
      'the source': load({}, 'ftp://example.org/'),
    };
    const outcomes = {};
    for (const [name, attempt] of Object.entries(tries)) outcomes[name] = await caught(attempt);
    return outcomes;
  });
  for (const [name, outcome] of Object.entries(outcomes)) {
    expectError(outcome, 'InvalidOption', /./);
    assert.equal(outcome.error.option, name);
  }
});

test('façade: loading can be stopped, and then asks for nothing more', async () => {
  let asked = 0;
  const slow = http.createServer((request, response) => {
    asked += 1;
    response.setHeader('access-control-allow-origin', '*');
    response.setHeader('access-control-allow-headers', '*');
    if (request.method === 'OPTIONS') return response.end();
    const config = fs.readFileSync(path.join(ROOT, 'tests/golden/tiny-llama-tied/config.json'));
    if (request.url.endsWith('config.json')) return response.writeHead(200, { 'content-length': config.length }).end(config);
    response.writeHead(200, { 'content-length': 1_000_000 }).write(Buffer.alloc(1000));
  });
  await new Promise((resolve) => slow.listen(0, '127.0.0.1', resolve));
  try {
    const outcome = await inPage(async ({ load, caught, argument }) => {
      const stop = new AbortController();
      const started = performance.now();
      const outcome = await caught(load({ signal: stop.signal, onProgress: (p) => p.file === 'model.safetensors' && stop.abort(new Error('enough')) }, argument));
      return { ...outcome, ms: performance.now() - started };
    }, `http://127.0.0.1:${slow.address().port}/`);
    expectError(outcome, 'Aborted', /loading was stopped/);
    const before = asked;
    await new Promise((resolve) => setTimeout(resolve, 300));
    assert.equal(asked, before);
  } finally {
    slow.closeAllConnections();
    slow.close();
  }
});

test('façade: disposing of a model ends what runs', async () => {
  const { running, later } = await inPage(async ({ load, caught }) => {
    let later;
    let running;
    {
      const model = await load();
      running = caught(model.generate('tell me').result);
      await model[Symbol.asyncDispose ?? 'dispose']();
      later = await caught(model.generate('tell me').result);
    }
    return { running: await running, later };
  });
  expectError(running, 'Aborted', /disposed/);
  expectError(later, 'Aborted', /disposed/);
});

test('façade: a worker that cannot be fetched, one that does not parse, and one from another origin', async () => {
  const elsewhere = http.createServer((request, response) => {
    response.writeHead(200, { 'content-type': 'text/javascript', 'access-control-allow-origin': '*' });
    response.end(`import { serve } from '${origin}pkg/dist/serve.js'; import { startDouble } from '${origin}tests/browser/double/engine.js'; serve(globalThis, async () => startDouble());`);
  });
  const origin = await site();
  await new Promise((resolve) => elsewhere.listen(0, '127.0.0.1', resolve));
  try {
    const { absent, broken, foreign } = await inPage(async ({ load, caught, argument }) => ({
      absent: await caught(load({ workerUrl: '/nowhere/worker.js' })),
      broken: await caught(load({ workerUrl: '/pkg/package.json' })),
      foreign: await caught(load({ workerUrl: argument }).then((model) => model.info.modelType)),
    }), `http://127.0.0.1:${elsewhere.address().port}/worker.js`);
    expectError(absent, 'Fetch', /\/nowhere\/worker\.js.*workerUrl/);
    expectError(broken, 'Fetch', /worker script/);
    // The double's modules are of the page's own origin, and the server gives no CORS headers for them: the blob that
    // imports the foreign script is of the page's origin too, so they load.
    assert.equal(foreign.value, 'llama', JSON.stringify(foreign));
  } finally {
    elsewhere.closeAllConnections();
    elsewhere.close();
  }
});

test('façade: a missing model, a web page instead of one, a truncated one', async () => {
  const tiny = path.join(ROOT, 'tests/golden/tiny-llama-tied');
  const weights = fs.readFileSync(path.join(tiny, 'model.safetensors'));
  const bad = http.createServer((request, response) => {
    response.setHeader('access-control-allow-origin', '*');
    response.setHeader('access-control-allow-headers', '*');
    if (request.method === 'OPTIONS') return response.end();
    if (request.url.startsWith('/spa/')) return response.writeHead(200, { 'content-type': 'text/html' }).end('<!doctype html>');
    if (request.url === '/short/config.json') return response.end(fs.readFileSync(path.join(tiny, 'config.json')));
    if (request.url === '/short/model.safetensors') return response.writeHead(200, { 'content-length': 20_000 }).end(weights.subarray(0, 20_000));
    response.writeHead(404).end();
  });
  await new Promise((resolve) => bad.listen(0, '127.0.0.1', resolve));
  try {
    const outcomes = await inPage(async ({ load, caught, argument }) => {
      const outcomes = {};
      for (const folder of ['none', 'spa', 'short']) outcomes[folder] = await caught(load({}, `${argument}/${folder}`));
      return outcomes;
    }, `http://127.0.0.1:${bad.address().port}`);
    expectError(outcomes.none, 'Fetch', /config\.json/);
    expectError(outcomes.spa, 'Fetch', /config\.json.*web page/);
    expectError(outcomes.short, 'BadWeights', /model\.safetensors.*truncated/);
  } finally {
    bad.closeAllConnections();
    bad.close();
  }
});

test('façade: no WebGPU, or WebGPU without an adapter, is said in words that help', async () => {
  const { outcome, look, other, info } = await inPage(async ({ load, caught, availability }) => ({ outcome: await caught(load({ backend: 'webgpu' })), look: await availability(undefined, { backend: 'webgpu' }), other: await availability(), info: (await load({ backend: 'auto' })).info }), null, 'flagless');
  expectError(outcome, 'Unsupported', /found no GPU.*hardware acceleration/);
  assert.equal(look.available, false);
  assert.match(look.reason, /found no GPU/);
  assert.deepEqual([look.device.adapter, look.files], [null, []]);
  assert.deepEqual([other.available, other.backend, info.backend], [true, 'cpu', 'cpu']);
  assert.match(info.backendReason, /found no GPU/);
});

test('façade: availability tells files, bytes and the device without fetching a body', async () => {
  const page = await blankPage('stock');
  const methods = [];
  page.on('request', (request) => request.url().includes('/models/') || request.url().includes('/golden/') ? methods.push(request.method()) : null);
  const [tiny, none] = await page.evaluate(async (source) => {
    const { availability } = await import('/pkg/dist/index.js');
    return [await availability(source), await availability('/nowhere/')];
  }, TINY);
  const size = (file) => fs.statSync(path.join(ROOT, TINY, file)).size;
  assert.equal(tiny.available, true, tiny.reason);
  assert.equal(tiny.files.find(({ file }) => file === 'model.safetensors').bytes, size('model.safetensors'));
  assert.ok(tiny.files.some(({ file }) => file === 'draft_adapter/adapter_model.safetensors'));
  assert.equal(tiny.bytes, tiny.files.reduce((sum, { bytes }) => sum + bytes, 0));
  assert.equal(tiny.device.subgroups, true);
  assert.ok(methods.length > 0 && methods.every((method) => method === 'HEAD'), methods.join());
  assert.equal(none.available, false);
  assert.match(none.reason, /no config\.json/);
});
