// Façade, worker, transport and store in a browser, with the double where the wasm module would be.

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
        return await (0, eval)(`(${source})`)({ ...forecall, load, caught, tiny, argument });
      } catch (error) {
        return { error: plain(error), stack: error.stack };
      }
    },
    { source: String(body), argument, tiny: TINY },
  );
  assert.deepEqual(page.errors, []);
  if (result?.stack) throw new Error(`in the page: ${result.error.message}\n${result.stack}`);
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
  assert.deepEqual(phases, ['start', 'config', 'download', 'upload', 'compile', 'ready']);
  for (const phase of phases) {
    const told = progress.filter((p) => p.phase === phase);
    for (const [i, p] of told.entries()) {
      assert.ok(p.bytes <= p.total, JSON.stringify(p));
      assert.ok(i === 0 || p.bytes >= told[i - 1].bytes, `bytes of ${phase} went back`);
    }
    assert.equal(told.at(-1).bytes, told.at(-1).total);
  }
  const size = (file) => fs.statSync(path.join(ROOT, 'tests/golden/tiny-llama-tied', file)).size;
  const downloaded = progress.findLast((p) => p.phase === 'download').bytes;
  assert.ok(downloaded >= size('config.json') + size('model.safetensors') + size('draft_adapter/adapter_config.json'));
  assert.deepEqual(progress.findLast((p) => p.phase === 'compile').pipelines, { done: 12, total: 12 });
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
  const outcomes = await inPage(async ({ load, caught, availability, storage }) => {
    const model = await load();
    const nested = (depth) => (depth === 0 ? 1 : [nested(depth - 1)]);
    const chat = [{ role: 'user', content: 'x' }];
    await model.generate(chat, { maxTokens: 1, templateVariables: { deep: nested(63) } }).result;
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
      cachePrompt: model.generate('x', { cachePrompt: 1 }).result,
      templateVariables: model.generate('x', { templateVariables: ['tools'] }).result,
      signal: model.generate('x', { signal: {} }).result,
      prompt: model.generate([{ role: 'user' }]).result,
      dtype: load({ dtype: 'q4' }),
      backend: load({ backend: 'cuda' }),
      precision: load({ precision: 'f64' }),
      contextLength: load({ contextLength: -1 }),
      'the source': load({}, 'ftp://example.org/'),
      quantize: load({ quantize: 'q3' }),
      store: load({ store: 'yes' }),
      fetch: load({ fetch: '/proxy' }),
      onWarning: load({ onWarning: true }),
      hubUrl: load({ hubUrl: 'ftp://example.org/' }),
      revision: load({ revision: 'main' }),
      'the adapter': load({ adapter: [] }),
      headers: load({ headers: { 'no name': 'x' } }),
    };
    // The same name again, for other values.
    const more = {
      'headers 1': load({ headers: 'Authorization: x' }),
      'headers 2': load({ headers: { accept: 'x\ny' } }),
      'the source 1': load({}, `${location.origin.replace('//', '//user:secret@')}/models/`),
      'contextLength 1': load({ contextLength: Object.create(null) }),
      'stop 1': model.generate('x', { stop: '\ud83d' }).result,
      'prompt 1': model.generate({ tokens: [1, , 2] }).result,
      'prompt 2': model.generate(Object.create(null)).result,
      'prompt 3': model.generate({ tokens: 'abc' }).result,
      'prompt 4': model.generate({ tokens: Float32Array.of(1, 0.5) }).result,
      'prompt 5': model.generate({ tokens: BigUint64Array.of(1n) }).result,
      'prompt 6': model.generate({ tokens: new DataView(new ArrayBuffer(8)) }).result,
      'templateVariables 1': model.generate('x', { templateVariables: { tools: [] } }).result,
      'templateVariables 2': model.generate([{ role: 'user', content: 'x' }], { templateVariables: { messages: [] } }).result,
      'templateVariables 3': model.generate([{ role: 'user', content: 'x' }], { templateVariables: { toJSON: () => 5 } }).result,
      'templateVariables 4': model.generate([{ role: 'user', content: 'x' }], { templateVariables: { a: 1n } }).result,
      'dtype 1': availability(undefined, { dtype: 'q4' }),
      'hubUrl 1': availability(undefined, { hubUrl: 'nonsense:' }),
      'what 1': storage.delete(undefined),
      'what 2': storage.delete(null),
    };
    // What throws as it is read, or is too much to be read.
    const { proxy, revoke } = Proxy.revocable({}, {});
    revoke();
    const mine = (name) => Object.defineProperty({}, name, { enumerable: true, get: () => { throw new RangeError('mine'); } });
    const detached = Uint32Array.of(1);
    structuredClone(detached, { transfer: [detached.buffer] });
    const hostile = {
      'options 1': model.generate('x', mine('maxTokens')).result,
      'options 2': model.generate('x', proxy).result,
      'options 3': availability(undefined, mine('store')),
      'options 4': availability(undefined, proxy),
      'options 5': model.generate('x', { maxTokens: 1, signal: Object.create(AbortSignal.prototype) }).result,
      'prompt 7': model.generate({ tokens: detached }).result,
      'prompt 8': model.generate(proxy).result,
      'prompt 9': model.generate({ tokens: Array(2 ** 24 + 1) }).result,
      'prompt 0': model.generate([{ ...chat[0], deep: nested(64) }]).result,
      'templateVariables 5': model.generate(chat, { templateVariables: { deep: nested(64) } }).result,
      'the source 2': availability(null),
      'the source 3': load({}, proxy),
      'the source 4': load({}, Object.create(null)),
      'hubUrl 2': load({ hubUrl: '' }),
      'hubUrl 3': load({ hubUrl: null }),
      'workerUrl 1': load({ workerUrl: '' }),
      'workerUrl 2': load({ workerUrl: null }),
      'wasmUrl 1': load({ wasmUrl: '' }),
      'wasmUrl 2': load({ wasmUrl: Object.create(null) }),
    };
    for (const [name, attempt] of Object.entries({ ...more, ...hostile })) tries[name] = attempt;
    const outcomes = {};
    for (const [name, attempt] of Object.entries(tries)) outcomes[name] = await caught(attempt);
    return outcomes;
  });
  for (const [name, outcome] of Object.entries(outcomes)) {
    expectError(outcome, 'InvalidOption', /./);
    assert.equal(outcome.error.option, name.replace(/ \d$/, ''));
    assert.doesNotMatch(outcome.error.message, /secret/);
  }
  assert.match(outcomes['prompt 3'].error.message, /typed array of ids, got \{tokens: "abc"\}/);
});

test('façade: halves of surrogate pairs arrive as U+FFFD, and headers in every form', async () => {
  const { sent, headers } = await inPage(async ({ load }) => {
    const sent = [];
    const post = Worker.prototype.postMessage;
    Worker.prototype.postMessage = function (command, ...rest) {
      if (command.type === 'generate' || command.type === 'load') sent.push(command.request);
      return post.call(this, command, ...rest);
    };
    const forms = [{ 'X-One': 'a' }, [['X-One', 'a']], new Headers({ 'X-One': 'a' })];
    const models = [];
    for (const headers of forms) models.push(await load({ headers }));
    const headers = sent.splice(0).map(({ source }) => source.headers);
    await models[0].generate('a\ud83d', { maxTokens: 1 }).result;
    await models[0].generate([{ role: 'user\udc0b', content: '\ud83d\udc0b\udc0b', name: ['\ud83d'], 'k\ud83d': 1 }], { maxTokens: 1, templateVariables: { a: '\ud83d!' } }).result;
    return { sent, headers };
  });
  assert.deepEqual(headers, Array(3).fill({ 'x-one': 'a' }));
  assert.deepEqual(sent[0].prompt, { text: 'a\ufffd' });
  assert.deepEqual(sent[1].prompt, { messages: [{ role: 'user\ufffd', content: '🐋\ufffd', name: ['\ufffd'], 'k\ufffd': 1 }] });
  assert.deepEqual(sent[1].templateVariables, { a: '\ufffd!' });
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
      const outcome = await caught(load({ signal: stop.signal, onProgress: (p) => p.phase === 'download' && stop.abort(new Error('enough')) }, argument));
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

test('façade: disposing of a model ends what runs, and is over once for all who asked', async () => {
  const { running, later, order } = await inPage(async ({ load, caught }) => {
    let later;
    let running;
    const order = [];
    {
      const model = await load();
      running = caught(model.generate('tell me').result);
      const worker = Worker.prototype.terminate;
      Worker.prototype.terminate = function () {
        order.push('ended');
        return worker.call(this);
      };
      const first = model[Symbol.asyncDispose ?? 'dispose']();
      await model.dispose();
      order.push('second');
      await first;
      later = await caught(model.generate('tell me').result);
    }
    return { running: await running, later, order };
  });
  expectError(running, 'Aborted', /disposed/);
  expectError(later, 'Aborted', /disposed/);
  assert.deepEqual(order, ['ended', 'second'], 'the second call did not wait for the worker');
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
  assert.deepEqual([look.device.adapter, look.download], [null, null]);
  assert.deepEqual([other.available, other.backend, info.backend], [true, 'cpu', 'cpu']);
  assert.match(info.backendReason, /found no GPU/);
});

test('façade: availability tells files, bytes, memory and the device', async () => {
  const { tiny, none, device } = await inPage(async ({ availability, argument }) => {
    const look = (source) => availability(source, { workerUrl: '/tests/browser/double/worker.js', backend: 'webgpu' });
    return { tiny: await look(argument), none: await look('/nowhere/'), device: await availability() };
  }, TINY);
  const size = (file) => fs.statSync(path.join(ROOT, TINY, file)).size;
  assert.equal(tiny.available, true, tiny.reason);
  assert.equal(tiny.download.files.find(({ file }) => file === 'model.safetensors').bytes, size('model.safetensors'));
  assert.ok(tiny.download.files.some(({ file }) => file === 'draft_adapter/adapter_model.safetensors'));
  assert.equal(tiny.download.bytes, tiny.download.files.reduce((sum, { bytes }) => sum + bytes, 0));
  assert.deepEqual([tiny.model.type, tiny.model.drafter, tiny.download.stored, tiny.limit], ['llama', true, 0, null]);
  assert.ok(tiny.memory.weights > 0 && tiny.memory.largestBinding.bytes > 0 && tiny.room.left > 1e6);
  assert.equal(tiny.device.subgroups, true);
  assert.equal(none.available, false);
  assert.match(none.reason, /no config\.json/);
  assert.deepEqual([device.available, device.download], [true, null]);
});

test('façade: files that were picked, one by one, and each at its own address', async () => {
  const { picked, folder, scattered, refused } = await inPage(async ({ load, caught, tiny }) => {
    const file = async (name, as = name) => Object.defineProperty(new File([await (await fetch(tiny + name)).blob()], name.split('/').at(-1)), 'webkitRelativePath', { value: as });
    const kind = async (source, options) => {
      const model = await load(options, source);
      await model.dispose();
      return [model.info.modelType, model.info.drafter !== null];
    };
    const names = ['config.json', 'model.safetensors', 'draft_adapter/adapter_config.json', 'draft_adapter/adapter_model.safetensors'];
    const deep = await Promise.all(names.map((name) => file(name, `downloads/tiny/${name}`)));
    const flat = await Promise.all(names.slice(0, 2).map((name) => file(name, '')));
    const adapter = await Promise.all(names.slice(2).map((name) => file(name, name.split('/').at(-1))));
    return {
      folder: await kind(deep),
      picked: [await kind(flat), await kind(flat, { adapter })],
      scattered: await kind({ 'config.json': `data:application/json,${encodeURIComponent(await flat[0].text())}`, 'model.safetensors': `${tiny}model.safetensors` }),
      refused: { empty: await caught(load({}, [])), number: await caught(load({}, 7)), texts: await caught(load({}, ['a'])), part: await caught(load({}, [flat[0]])), nowhere: await caught(load({}, { 'config.json': '/c.json' })) },
    };
  });
  assert.deepEqual(folder, ['llama', true]);
  assert.deepEqual(picked, [['llama', false], ['llama', true]]);
  assert.deepEqual(scattered, ['llama', false]);
  expectError(refused.empty, 'InvalidOption', /without files/);
  expectError(refused.number, 'InvalidOption', /repo id/);
  expectError(refused.texts, 'InvalidOption', /"a"/);
  expectError(refused.nowhere, 'InvalidOption', /\.safetensors/);
  expectError(refused.part, 'Fetch', /model\.safetensors/);
});

test('façade: the page\'s own fetch is used, piece by piece, and stops with the load', async () => {
  const { calls, type, failed, gaveUp, hungUp, stopped, silenced } = await inPage(async ({ load, caught, tiny }) => {
    const calls = [];
    const own = (url, init) => {
      calls.push({ path: new URL(url).pathname, token: init.headers['x-token'], referrer: init.referrerPolicy });
      return fetch(url, init);
    };
    const model = await load({ fetch: own, headers: { 'x-token': 'open sesame' } });
    const failed = await caught(load({ fetch: () => Promise.reject(new TypeError('the proxy is down')) }));
    // An `AbortError` of its own making is nobody's stop: before an answer, and in the middle of one.
    const gaveUp = await caught(load({ fetch: () => Promise.reject(new DOMException('the proxy took too long', 'AbortError')) }));
    const torn = () => new ReadableStream({ pull: (out) => out.error(new DOMException('the proxy hung up', 'AbortError')) });
    const hungUp = await caught(load({ fetch: async (url, init) => (url.endsWith('/model.safetensors') ? new Response(torn(), { headers: { 'content-length': '100000' } }) : fetch(url, init)) }));
    const stop = new AbortController();
    let silenced = false;
    const endless = async (url, init) => {
      if (!url.endsWith('model.safetensors')) return fetch(url, init);
      init.signal.addEventListener('abort', () => (silenced = true));
      return new Response(new ReadableStream({ pull: (out) => new Promise((resolve) => setTimeout(() => resolve(out.enqueue(new Uint8Array(10))), 20)) }), { headers: { 'content-length': '100000' } });
    };
    const stopped = await caught(load({ fetch: endless, signal: stop.signal, onProgress: (p) => p.phase === 'download' && stop.abort() }));
    await new Promise((resolve) => setTimeout(resolve, 100));
    return { calls, type: model.info.modelType, failed, gaveUp, hungUp, stopped, silenced, tiny };
  });
  assert.equal(type, 'llama');
  assert.ok(calls.some(({ path }) => path.endsWith('/model.safetensors')));
  for (const { token, referrer } of calls) assert.deepEqual([token, referrer], ['open sesame', 'no-referrer']);
  expectError(failed, 'Fetch', /the proxy is down/);
  expectError(gaveUp, 'Fetch', /the proxy took too long/);
  expectError(hungUp, 'Internal', /the proxy hung up/); // the double does not try again, and has no words for it
  expectError(stopped, 'Aborted', /signal/);
  assert.equal(silenced, true, 'the page goes on fetching');
});

test('façade: any bytes from the page\'s own fetch are taken, its buffers stay its own, and what is no bytes fails', async () => {
  const { types, kept, failed, status } = await inPage(async ({ load, caught, tiny }) => {
    const whole = new Uint8Array(await (await fetch(`${tiny}model.safetensors`)).arrayBuffer());
    const answer = (piece) => ({ status: 200, headers: new Headers({ 'content-length': String(whole.byteLength) }), body: new ReadableStream({ start: (out) => (out.enqueue(piece), out.close()) }) });
    const given = (piece) => load({ store: false, fetch: async (url, init) => (url.endsWith('/tiny-llama-tied/model.safetensors') ? answer(piece) : fetch(url, init)) });
    const types = [];
    for (const piece of [whole, new DataView(whole.buffer), whole.buffer]) types.push((await given(piece)).info.modelType);
    const status = await caught(load({ store: false, fetch: async () => ({ ...answer(whole), headers: new Headers(), status: () => 200 }) }));
    return { types, kept: whole.byteLength, failed: await caught(given('a text')), status };
  });
  assert.deepEqual(types, ['llama', 'llama', 'llama']);
  assert.ok(kept > 0, 'the page\'s buffer was taken from it');
  expectError(failed, 'Internal', /no bytes/); // the double has no words for it
  assert.ok(status.error?.isOurs, JSON.stringify(status));
});

test('façade: a worker hears only its page\'s commands, and a script that is no worker of ours is not waited for', async () => {
  const { model, silent } = await inPage(async ({ load, caught }) => {
    const post = Worker.prototype.postMessage;
    Worker.prototype.postMessage = function (...message) {
      for (const foreign of [null, 7, 'load', { type: 'webpackOk' }]) post.call(this, foreign);
      return post.apply(this, message);
    };
    const model = (await load()).info.modelType;
    const later = globalThis.setTimeout;
    globalThis.setTimeout = (work, ms) => later(work, ms === 30_000 ? 300 : ms);
    return { model, silent: await caught(load({ workerUrl: '/tests/browser/no-fallback.js' })) };
  });
  assert.equal(model, 'llama');
  expectError(silent, 'Fetch', /no-fallback\.js did not start.*workerUrl/);
});

for (const [where, worker] of [['the origin private file system', 'worker.js'], ['the cache', 'no-files-worker.js']]) {
  test(`façade: what is stored in ${where} can be listed, measured and deleted`, async () => {
    const { lists, sizes, deleted, warnings } = await inPage(async ({ load, storage, availability, tiny, argument }) => {
      const warnings = [];
      const options = { workerUrl: `/tests/browser/double/${argument}`, onWarning: (warning) => warnings.push(warning) };
      const lists = [await storage.list()];
      await (await load({ ...options, store: false })).dispose();
      lists.push(await storage.list());
      await (await load(options)).dispose();
      await (await load(options, new URL('/tests/golden/tiny-llama/', location))).dispose();
      lists.push(await storage.list());
      const look = await availability(tiny, { workerUrl: options.workerUrl, backend: 'cpu' });
      const sizes = [await storage.size(), look.download.stored, look.download.bytes];
      const deleted = [await storage.delete('/nowhere/'), await storage.delete(tiny)];
      lists.push(await storage.list());
      deleted.push(await storage.delete(lists.at(-1)[0]), await storage.delete());
      lists.push(await storage.list());
      return { lists, sizes, deleted, warnings };
    }, worker);
    assert.deepEqual(lists.map((list) => list.length), [0, 0, 2, 1, 0]);
    assert.deepEqual(lists[2].map(({ source }) => new URL(source).pathname), ['/tests/golden/tiny-llama/', TINY], 'the last used comes first');
    for (const { complete, role, bytes, used } of lists[2]) assert.ok(complete && role === 'model' && bytes > 10_000 && used instanceof Date, JSON.stringify(lists[2]));
    assert.equal(sizes[0], lists[2][0].bytes + lists[2][1].bytes);
    assert.ok(sizes[1] > 0 && sizes[2] === 0);
    assert.deepEqual(deleted, [0, 1, 1, 0]);
    assert.deepEqual(warnings, []);
  });
}

test('façade: storage.persist tells what the browser decides', async () => {
  const page = await blankPage('stock');
  const ask = () => page.evaluate(async () => [await (await import('/pkg/dist/index.js')).storage.persist(), await navigator.storage.persisted()]);
  assert.deepEqual(await ask(), [false, false]);
  const session = await page.context().newCDPSession(page);
  const { targetInfo } = await session.send('Target.getTargetInfo');
  await session.send('Browser.grantPermissions', { origin: new URL(page.url()).origin, permissions: ['durableStorage'], browserContextId: targetInfo.browserContextId });
  assert.deepEqual(await ask(), [true, true]);
});

test('façade: what the browser throws of its storage is typed', async () => {
  const outcomes = await inPage(async ({ load, caught, storage }) => {
    await (await load()).dispose();
    const { entries } = FileSystemDirectoryHandle.prototype;
    FileSystemDirectoryHandle.prototype.entries = () => {
      throw new DOMException('the disk is gone', 'UnknownError');
    };
    const outcomes = [await caught(storage.list()), await caught(storage.size()), await caught(storage.delete())];
    FileSystemDirectoryHandle.prototype.entries = entries;
    FileSystemDirectoryHandle.prototype.removeEntry = () => Promise.reject(new DOMException('it is open', 'NoModificationAllowedError'));
    StorageManager.prototype.persist = () => Promise.reject(new TypeError('not here'));
    return [...outcomes, await caught(storage.persist()), await caught(storage.delete()), await caught(storage.list())];
  });
  for (const outcome of outcomes.slice(0, 3)) expectError(outcome, 'Unsupported', /refuses its storage.*the disk is gone/);
  expectError(outcomes[3], 'Unsupported', /not here/);
  expectError(outcomes[4], 'Busy', /in use/);
  assert.equal(outcomes[5].value.length, 1);
});

test('façade: no half-written file stays behind, be it of a write that failed or of a worker that was ended', async () => {
  const page = await blankPage('stock');
  const names = () =>
    page.evaluate(async () => {
      const found = [];
      const root = await (await navigator.storage.getDirectory()).getDirectoryHandle('forecall');
      for await (const folder of root.values()) for await (const [name, file] of folder.entries()) found.push([name, (await file.getFile()).size]);
      return found.sort();
    });
  const put = (name, bytes) =>
    page.evaluate((asked) => {
      globalThis.worker ??= new Worker('/tests/browser/store-worker.js', { type: 'module' });
      return new Promise((resolve) => {
        worker.onmessage = ({ data }) => resolve(data);
        worker.postMessage(asked);
      });
    }, { name, bytes });
  assert.equal(await put('entry/blob', 1000), 'put');
  const session = await page.context().newCDPSession(page);
  await session.send('Storage.overrideQuotaForOrigin', { origin: new URL(page.url()).origin, quotaSize: 4_000_000 });
  assert.equal(await put('entry/blob', 40_000_000), 'QuotaExceededError');
  assert.deepEqual(await names(), [['blob', 1000]]);
  await session.send('Storage.overrideQuotaForOrigin', { origin: new URL(page.url()).origin });
  // Control: with room it is replaced.
  assert.equal(await put('entry/blob', 40_000_000), 'put');
  assert.deepEqual(await names(), [['blob', 40_000_000]]);

  const { before, after } = await inPage(async ({ load, storage }) => {
    await (await load()).dispose();
    const [{ id }] = await storage.list();
    const folder = await (await (await navigator.storage.getDirectory()).getDirectoryHandle('forecall')).getDirectoryHandle(id);
    const names = async () => (await Array.fromAsync(folder.keys())).sort();
    await folder.getFileHandle('weights-1.tmp', { create: true });
    const before = await names();
    await (await load()).dispose();
    return { before, after: await names() };
  });
  assert.deepEqual([before, after], [['manifest.json', 'weights-0', 'weights-1.tmp'], ['manifest.json', 'weights-0']]);
});
