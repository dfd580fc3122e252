// Loading from servers that behave and servers that do not, into the browser's store and out of it again: the real engine
// on the CPU, against checkpoints that are made up as they are sent.

import assert from 'node:assert/strict';
import fs from 'node:fs';
import path from 'node:path';
import { COMMIT, faultServer, folder, madeUpCheckpoint } from './faults.mjs';
import { blankPage, record, ROOT, site, test } from './harness.mjs';

const REPO = 'someone/made-up';
const MIDDLE = madeUpCheckpoint({ hidden: 512, ffn: 2048, heads: 8, kvHeads: 2, layers: 5, vocab: 4096 });
const BIG = madeUpCheckpoint({ hidden: 2048, ffn: 8192, heads: 32, kvHeads: 8, layers: 2, vocab: 16_384 });
const SORTED = madeUpCheckpoint({ hidden: 1024, ffn: 4096, heads: 16, kvHeads: 4, layers: 6, vocab: 8192, sorted: true });
const WEIGHTS = 'model.safetensors';
/** Bytes read beyond what is needed: a stream is stopped by closing it, and some is on its way then. */
const OVERRUN = 12 << 20;
const tiny = (name) => folder(path.join(ROOT, 'tests', 'golden', name));

/** Loads in a page, and generates a few tokens. `stopAt` stops it when a phase has moved so many bytes. */
function load(page, source, options = {}, { stopAt = null, token = null, tokens = 12 } = {}) {
  return page.evaluate(
    async ({ source, options, stopAt, token, tokens }) => {
      const forecall = await import('/pkg/dist/index.js');
      const [progress, warnings] = [[], []];
      const stop = new AbortController();
      const own = token && ((url, init) => fetch(url, { ...init, headers: { ...init.headers, authorization: token } }));
      const outcome = { progress, warnings };
      try {
        const model = await forecall.load(source ?? [...document.getElementById('files').files], {
          backend: 'cpu',
          contextLength: 64,
          ...options,
          ...(own && { fetch: own }),
          signal: stop.signal,
          onWarning: (warning) => warnings.push(warning),
          onProgress: (p) => {
            progress.push({ ...p });
            if (stopAt && p.phase === stopAt.phase && p.bytes >= stopAt.bytes) stop.abort();
          },
        });
        outcome.ids = (await model.generate({ tokens: [1, 2, 3] }, { maxTokens: tokens, ignoreEos: true }).result).tokens;
        outcome.info = model.info;
        await model.dispose();
      } catch (error) {
        outcome.error = { ...error, code: error.code, message: error.message };
      }
      outcome.stored = await forecall.storage.list();
      return outcome;
    },
    { source, options, stopAt, token, tokens },
  );
}

const look = (page, source, options) =>
  page.evaluate(async ({ source, options }) => (await import('/pkg/dist/index.js')).availability(source, { backend: 'cpu', contextLength: 64, ...options }), { source, options });

const codes = ({ warnings }) => warnings.map(({ code }) => code);
const phases = ({ progress }) => [...new Set(progress.map(({ phase }) => phase))];

function expectLoaded(outcome, like = null) {
  assert.equal(outcome.error, undefined, JSON.stringify(outcome.error));
  assert.equal(outcome.progress.at(-1).phase, 'ready');
  if (like) assert.deepEqual(outcome.ids, like.ids, 'another text than the same model gave before');
}

function expectError({ error, progress, stored }, code, about, nothingStored = true) {
  assert.ok(error, 'no error');
  assert.equal(error.code, code, error.message);
  assert.match(error.message, about);
  assert.ok(!progress.some(({ phase }) => phase === 'ready'), 'it was ready');
  if (nothingStored) assert.deepEqual(stored, []);
}

/** Runs `body` with a server of the middle checkpoint, as a folder and as a repo, and a page in a context of its own. */
async function withServer(body, { folders = { [REPO]: MIDDLE }, hashes, worker } = {}) {
  const server = await faultServer(folders, { hashes });
  const page = await blankPage('stock');
  const options = { hubUrl: server.url, quantize: 'q4', ...(worker && { workerUrl: `/tests/browser/${worker}` }) };
  try {
    await body({ server, page, options });
    assert.deepEqual(page.errors, []);
  } finally {
    await server.stop();
  }
}

/** Waits until so many bytes lie in the store, or the load that is to put them there is over. */
async function untilStored(page, bytes, outcome) {
  const size = () => page.evaluate(async () => (await import('/pkg/dist/index.js')).storage.size());
  const until = Date.now() + 60_000;
  let stored = 0;
  while (Date.now() < until && (stored = await size()) < bytes && !outcome()) await new Promise((resolve) => setTimeout(resolve, 30));
  assert.equal(outcome(), null, 'the load was over before it was closed');
  assert.ok(stored >= bytes, `${stored} of ${bytes} bytes are stored`);
}

/** Another tab of the same browser. */
async function tab(page) {
  const other = await page.context().newPage();
  await other.goto(`${await site()}tests/browser/blank.html`);
  return other;
}

test('loading: 300 MB from a hub, made 4-bit as they stream, stored, and there again without the server', async () => {
  await withServer(async ({ server, page, options }) => {
    const size = BIG[WEIGHTS].size;
    const before = await look(page, REPO, options);
    assert.equal(before.available, true, before.reason);
    assert.ok(before.download.bytes >= size && before.download.stored === 0, JSON.stringify(before.download));
    assert.ok(before.memory.weights > size / 5 && before.memory.weights < size / 2, JSON.stringify(before.memory));
    const looked = server.weightBytes();
    assert.ok(looked < 1 << 20, `${looked} bytes of weights were sent to tell their size`);

    const since = server.log.length;
    const first = await load(page, REPO, options);
    expectLoaded(first);
    // A CPU has nothing to compile; downloads and uploads take turns.
    assert.deepEqual([...phases(first)].sort(), ['config', 'download', 'ready', 'start', 'upload']);
    const downloads = first.progress.filter(({ phase }) => phase === 'download');
    assert.ok(downloads.every(({ bytes, total }) => bytes <= total));
    assert.ok(downloads.some(({ rate }) => rate > 1e6), 'no rate was told');
    const sent = server.weightBytes(since);
    assert.ok(sent >= size && sent < size + OVERRUN, `${sent} bytes were sent of a file of ${size}`);
    const [entry] = first.stored;
    assert.equal(first.stored.length, 1);
    assert.ok(entry.complete && entry.bytes > size / 5 && entry.bytes < size / 2, `${entry.bytes} bytes are stored of ${size}`);
    assert.match(entry.source, /someone\/made-up$/);
    assert.deepEqual(codes(first), []);

    const between = await look(page, REPO, options);
    assert.deepEqual([between.download.bytes, between.download.stored > size / 5], [0, true], JSON.stringify(between.download));
    const again = server.log.length;
    const stored = await load(await tab(page), REPO, options);
    expectLoaded(stored, first);
    assert.equal(server.weightBytes(again), 0);

    await server.stop();
    const offline = await load(await tab(page), REPO, options);
    expectLoaded(offline, first);
    assert.deepEqual(codes(offline), ['store-offline']);
    const alone = await look(page, REPO, options);
    assert.deepEqual([alone.available, alone.download?.bytes], [true, 0], JSON.stringify(alone));
    record('loading-300-mb.json', { bytes: size, storedBytes: entry.bytes, first: first.info.timings, fromStore: stored.info.timings });
    await server.start();
  }, { folders: { [REPO]: BIG } });
}, { seconds: 180 });

test('loading: a stopped download goes on at its byte; so does one whose page was closed', async () => {
  await withServer(async ({ server, page, options }) => {
    const size = MIDDLE[WEIGHTS].size;
    server.behave(() => ({ slow: 4 }));
    const stopped = await load(page, REPO, options, { stopAt: { phase: 'download', bytes: size * 0.5 } });
    expectError(stopped, 'Aborted', /stopped/, false);
    assert.deepEqual(stopped.stored.map(({ complete }) => complete), [false]);
    const partly = await look(page, REPO, options);
    assert.ok(partly.download.stored > 0 && partly.download.bytes < size, JSON.stringify(partly.download));

    const since = server.log.length;
    const closing = await tab(page);
    let early = null;
    const pending = load(closing, REPO, options).then((outcome) => (early = outcome), () => null);
    // By what is stored, not by what was sent, which may lie in buffers; a block more than one, so that the first one's place
    // is written down.
    const [entry] = stopped.stored;
    await untilStored(page, entry.bytes + 2_800_000, () => early);
    await closing.close();
    await pending;
    const second = server.log.slice(since).filter(({ file }) => file === WEIGHTS);
    assert.ok(second[0]?.from > size * 0.2, `the second load began at byte ${second.map(({ from }) => from)}; asked for ${server.log.slice(since).map(({ file }) => file)}`);

    const last = server.log.length;
    server.behave();
    const resumed = await load(await tab(page), REPO, options);
    expectLoaded(resumed);
    const third = server.log.slice(last).filter(({ file }) => file === WEIGHTS);
    assert.ok(third.at(-1).from > second[0].from, `the third load began at byte ${third.map(({ from }) => from)}`);
    assert.ok(server.weightBytes() < size + 2 * OVERRUN, `${server.weightBytes()} bytes were sent in all of a file of ${size}`);
    assert.deepEqual(resumed.stored.map(({ complete }) => complete), [true]);
    // The same text as from a load that was never interrupted.
    expectLoaded(await load(page, REPO, { ...options, store: false }), resumed);
    expectLoaded(await load(page, REPO, options), resumed);
  });
}, { seconds: 180 });

test('loading: a file with all scales behind all weights whose page was closed goes on where it was', async () => {
  await withServer(async ({ server, page, options }) => {
    const size = SORTED[WEIGHTS].size;
    server.behave(() => ({ slow: 2 }));
    const closing = await tab(page);
    let early = null;
    // In the groups that it has: asking for others would be answered by a warning.
    const { quantize, ...plain } = options;
    const pending = load(closing, REPO, plain).then((outcome) => (early = outcome), () => null);
    // No step ends before the last of the file: what is stored is what came. A few blocks more than what is to count, because
    // what is stored counts once its place is written down, and a page may be closed between the one and the other.
    const counted = 36 << 20;
    await untilStored(page, counted + (12 << 20), () => early);
    await closing.close();
    await pending;
    const partly = await look(page, REPO, plain);
    assert.ok(partly.download.stored >= counted && partly.download.bytes <= size - counted, JSON.stringify(partly.download));
    const listed = await page.evaluate(async () => (await import('/pkg/dist/index.js')).storage.list());
    assert.ok(listed.length === 1 && !listed[0].complete && listed[0].bytes >= counted, JSON.stringify(listed));

    server.behave();
    const last = server.log.length;
    const resumed = await load(await tab(page), REPO, plain);
    expectLoaded(resumed);
    assert.deepEqual(codes(resumed), []);
    const downloads = resumed.progress.filter(({ phase }) => phase === 'download');
    assert.equal(downloads.at(-1).total, partly.download.bytes, 'another total than was announced');
    const again = server.weightBytes(last);
    assert.ok(again <= partly.download.bytes + (1 << 20), `${again} bytes were sent; ${partly.download.bytes} were announced`);
    // The control is the size of the file: from near its start all of it would have come again.
    assert.ok(server.weightBytes() < size + (32 << 20) + OVERRUN, `${server.weightBytes()} bytes were sent in all of a file of ${size}`);
    const raw = await page.evaluate(async () => {
      const root = await (await navigator.storage.getDirectory()).getDirectoryHandle('forecall');
      const names = [];
      for await (const folder of root.values()) for await (const name of folder.keys()) names.push(name);
      return names.filter((name) => name.startsWith('raw-') || name.endsWith('.tmp'));
    });
    assert.deepEqual(raw, []);
    assert.ok(resumed.stored[0].complete && resumed.stored[0].bytes < size * 1.1, JSON.stringify(resumed.stored));
    // The same text as from a load that was never interrupted.
    expectLoaded(await load(page, REPO, { ...plain, store: false }), resumed);
    await server.stop();
    expectLoaded(await load(page, REPO, plain), resumed);
    await server.start();
  }, { folders: { [REPO]: SORTED } });
}, { seconds: 180 });

test('loading: a name or password in an address is refused before anything is asked for, and not repeated', async () => {
  await withServer(async ({ server, page, options }) => {
    const secret = server.url.replace('://', '://user:secret@');
    for (const [source, more] of [[`${secret}/${REPO}/`, {}], [REPO, { hubUrl: secret }], [REPO, { adapter: `${secret}/x/` }]]) {
      const since = server.log.length;
      const outcome = await load(page, source, { ...options, ...more });
      expectError(outcome, 'InvalidOption', /header/);
      assert.doesNotMatch(outcome.error.message, /secret/);
      assert.equal(server.log.length, since);
    }
    expectLoaded(await load(page, `${server.url.replace('http', 'HTTP')}/${REPO}/`, options));
  });
}, { seconds: 60 });

test('loading: a file with another hash than the hub lists never gets ready, and nothing of it stays', async () => {
  await withServer(async ({ server, page, options }) => {
    server.behave(({ file }) => (file === WEIGHTS ? { flip: MIDDLE[WEIGHTS].size - 3_000_000 } : null));
    const flipped = await load(page, REPO, options);
    expectError(flipped, 'Fetch', /model\.safetensors.*SHA-256/s);
    assert.equal(flipped.error.file, WEIGHTS);
    server.behave();
    // The control: unchanged bytes are taken, and from an address, which lists no hashes, changed ones too.
    expectLoaded(await load(page, REPO, options));
    server.behave(({ file }) => (file === WEIGHTS ? { flip: MIDDLE[WEIGHTS].size - 3_000_000 } : null));
    expectLoaded(await load(page, `${server.url}/${REPO}/`, options));
  });
}, { seconds: 90 });

test('loading: more than the browser gives room for runs all the same, with a warning and nothing half stored', async () => {
  await withServer(async ({ page, options }) => {
    const session = await page.context().newCDPSession(page);
    await session.send('Storage.overrideQuotaForOrigin', { origin: new URL(await site()).origin, quotaSize: 4_000_000 });
    // What browsers say beforehand is a fixed number, whatever there is.
    const tight = await look(page, REPO, options);
    assert.ok(tight.room.left > 0 && tight.room.needed > 4_000_000, JSON.stringify(tight.room));
    const outcome = await load(page, REPO, options);
    expectLoaded(outcome);
    assert.deepEqual(codes(outcome), ['store-quota']);
    assert.deepEqual(outcome.stored, []);
    await session.send('Storage.overrideQuotaForOrigin', { origin: new URL(await site()).origin });
    const roomy = await load(page, REPO, options);
    expectLoaded(roomy, outcome);
    assert.deepEqual([codes(roomy), roomy.stored.length], [[], 1]);
  });
}, { seconds: 90 });

test('loading: two tabs at once both run; one of them stores', async () => {
  await withServer(async ({ server, page, options }) => {
    server.behave(() => ({ slow: 3 }));
    const other = await tab(page);
    const outcomes = await Promise.all([load(page, REPO, options), load(other, REPO, options)]);
    expectLoaded(outcomes[0]);
    expectLoaded(outcomes[1], outcomes[0]);
    assert.deepEqual(outcomes.flatMap(codes), ['store-busy']);
    await server.stop();
    const offline = await load(page, REPO, options);
    expectLoaded(offline, outcomes[0]);
    assert.deepEqual(offline.stored.map(({ complete }) => complete), [true]);
    await server.start();
  });
}, { seconds: 120 });

test('loading: without the origin private file system the cache keeps the model', async () => {
  await withServer(async ({ server, page, options }) => {
    const first = await load(page, REPO, options);
    expectLoaded(first);
    assert.equal(await page.evaluate(() => caches.has('forecall')), true);
    await server.stop();
    expectLoaded(await load(await tab(page), REPO, options), first);
    const left = await page.evaluate(async () => {
      const { storage } = await import('/pkg/dist/index.js');
      const size = await storage.size();
      return [size > 1e6, await storage.delete(), await storage.size()];
    });
    assert.deepEqual(left, [true, 1, 0]);
    await server.start();
  }, { worker: 'no-files-worker.js' });
}, { seconds: 90 });

test('loading: connections that break or fall silent, and servers without ranges: the same model, each byte about once', async () => {
  await withServer(async ({ server, page, options }) => {
    const size = MIDDLE[WEIGHTS].size;
    const plain = await load(page, REPO, { ...options, store: false });
    expectLoaded(plain);
    const manners = {
      cut: ({ nth }) => (nth < 5 ? { cut: 7_000_000 } : null),
      stall: ({ nth }) => (nth === 0 ? { stall: 5_000_000 } : null),
      whole: () => ({ whole: true }),
      busy: ({ nth }) => (nth < 2 ? { status: 503 } : null),
    };
    for (const [name, manner] of Object.entries(manners)) {
      const since = server.log.length;
      let nth = -1;
      server.behave((asked) => (asked.file === WEIGHTS ? manner({ ...asked, nth: ++nth }) : null));
      const outcome = await load(page, REPO, { ...options, store: false, workerUrl: '/tests/browser/impatient-worker.js' });
      expectLoaded(outcome, plain);
      assert.ok(server.weightBytes(since) < size + OVERRUN, `${name}: ${server.weightBytes(since)} bytes were sent of a file of ${size}`);
    }
  });
}, { seconds: 120 });

test('loading: answers that are not the file are refused, by what they are, and nothing of them stays', async () => {
  await withServer(async ({ server, page, options }) => {
    const address = `${server.url}/${REPO}/`;
    const weights = (manner) => (asked) => (asked.file === WEIGHTS ? manner(asked) : null);
    // The first request asks for the header only.
    let nth = 0;
    const cases = [
      [weights(() => ({ html: true })), 'Fetch', /web page/],
      [({ file }) => (file === 'config.json' ? { html: true } : null), 'Fetch', /config\.json.*web page/s],
      [weights(() => ({ ranges: 'wrong', cut: nth++ < 2 ? 9_000_000 : undefined })), 'Fetch', /ranges are broken/],
      [weights(() => (nth++ < 2 ? { cut: 9_000_000 } : { etag: '"2"' })), 'Fetch', /changed on the server/],
      [weights(() => (nth++ < 2 ? { cut: 9_000_000 } : { size: 7 })), 'Fetch', /changed|has 7|bytes/],
      [weights(() => ({ size: MIDDLE[WEIGHTS].size - 1_000_000, whole: true })), 'BadWeights', /model\.safetensors: tensor `model\.layers\.4\.[^`]+` lies at bytes \d+ to \d+ of the data, of which the file has \d+; it is cut short/],
      [() => ({ status: 401 }), 'Fetch', /permission/],
      [() => ({ status: 404 }), 'Fetch', /no config\.json/],
    ];
    const wrong = [];
    for (const [manner, code, about] of cases) {
      nth = 0;
      server.behave(manner);
      const outcome = await load(page, address, options);
      try {
        expectError(outcome, code, about);
      } catch (error) {
        wrong.push(`${manner}: ${error.message}`);
      }
    }
    assert.deepEqual(wrong, []);
    // A hub lists sizes, and the hash of what it has.
    server.behave(weights(() => ({ size: MIDDLE[WEIGHTS].size + 5, whole: true })));
    expectError(await load(page, REPO, options), 'Fetch', /bytes/);
    server.behave(({ repo }) => (repo ? { html: true } : null));
    expectError(await load(page, REPO, options), 'Fetch', /hub|web page|listing/);
    server.behave();
    expectError(await load(page, 'someone/else', options), 'Fetch', /someone\/else/);
    expectError(await load(page, 'no source at all', options), 'InvalidOption', /no source at all/);
    expectLoaded(await load(page, address, options));
  });
}, { seconds: 120 });

test('loading: a gated repo needs the header, given as `headers` or by the page\'s own fetch; errors keep their fields', async () => {
  await withServer(async ({ server, page, options }) => {
    server.behave(({ headers }) => (headers.authorization === 'Bearer secret' ? null : { status: 401 }));
    const refused = await load(page, REPO, options);
    expectError(refused, 'Fetch', /permission/);
    assert.equal(refused.error.status, 401);
    assert.ok(refused.error.url.startsWith(server.url), refused.error.url);
    expectLoaded(await load(page, REPO, { ...options, headers: { Authorization: 'Bearer secret' }, store: false }));
    expectLoaded(await load(page, REPO, { ...options, store: false }, { token: 'Bearer secret' }));
    server.behave();
    const since = server.log.length;
    const missing = await load(page, `${server.url}/nobody/`, options);
    expectError(missing, 'Fetch', /config\.json/);
    assert.deepEqual([missing.error.file, missing.error.missing], ['config.json', true]);
    for (const { headers } of server.log.slice(since)) assert.equal(headers.referer, undefined, 'the page was named to the server');
  });
}, { seconds: 90 });

test('loading: a hub may send on to another host, which is given no token and needs no leave for ranges', async () => {
  const cdn = await faultServer({ [REPO]: MIDDLE });
  const hub = await faultServer({ [REPO]: MIDDLE }, { cdn: cdn.url });
  try {
    const page = await blankPage('stock');
    expectLoaded(await load(page, REPO, { hubUrl: hub.url, quantize: 'q4', store: false, headers: { Authorization: 'Bearer secret' } }));
    assert.ok(cdn.weightBytes() >= MIDDLE[WEIGHTS].size);
    assert.equal(hub.weightBytes(), 0);
    for (const { headers } of cdn.log) assert.equal(headers.authorization, undefined, 'the token was sent on to another host');
    assert.deepEqual(cdn.preflights, [], 'the browser had to ask for leave');
    assert.ok(hub.preflights.length > 0 && hub.preflights.every((headers) => /authorization/.test(headers)));
  } finally {
    await cdn.stop();
    await hub.stop();
  }
});

test('loading: stored blocks that were damaged are fetched again', async () => {
  await withServer(async ({ server, page, options }) => {
    const first = await load(page, REPO, options);
    expectLoaded(first);
    const damage = (how) =>
      page.evaluate(async (how) => {
        const root = await (await navigator.storage.getDirectory()).getDirectoryHandle('forecall');
        let damaged = 0;
        for await (const folder of root.values()) {
          for await (const [name, file] of folder.entries()) {
            if (!name.startsWith('block-') || damaged > 1) continue;
            const bytes = new Uint8Array(await (await file.getFile()).arrayBuffer());
            if (how === 'flip') bytes[bytes.length >> 1] ^= 1;
            const out = await file.createWritable();
            await out.write(how === 'cut' ? bytes.subarray(0, bytes.length >> 1) : bytes);
            await out.close();
            damaged += 1;
          }
        }
        return damaged;
      }, how);
    for (const how of ['cut', 'flip']) {
      assert.equal(await damage(how), 2);
      const since = server.log.length;
      const mended = await load(page, REPO, options);
      expectLoaded(mended, first);
      const sent = server.weightBytes(since);
      assert.ok(sent > 0, `${how}: nothing was fetched`);
      const after = server.log.length;
      expectLoaded(await load(page, REPO, options), first);
      assert.equal(server.weightBytes(after), 0, `${how}: it was not mended in the store`);
    }
  });
}, { seconds: 120 });

test('loading: a repo that moved on is loaded anew and the old copy goes; one that was asked for by its commit stays, offline too', async () => {
  await withServer(async ({ server, page, options }) => {
    const at = (letter) => server.behave(({ repo, path }) => (repo && path.includes('/revision/main') ? { commit: letter.repeat(40) } : null));
    const kept = ({ stored }) => stored.map(({ revision, complete }) => `${revision.slice(0, 4)} ${complete}`).sort();
    at('e');
    const first = await load(page, REPO, options);
    expectLoaded(first);
    const pinned = await load(page, REPO, { ...options, revision: COMMIT });
    expectLoaded(pinned, first);
    assert.deepEqual(kept(pinned), ['0123 true', 'eeee true']);
    at('f');
    const since = server.log.length;
    const moved = await load(page, REPO, options);
    expectLoaded(moved, first);
    assert.ok(server.weightBytes(since) >= MIDDLE[WEIGHTS].size);
    assert.deepEqual(kept(moved), ['0123 true', 'ffff true']);
    await server.stop();
    const offline = await load(page, REPO, { ...options, revision: COMMIT });
    expectLoaded(offline, first);
    assert.deepEqual(kept(offline), ['0123 true', 'ffff true']);
    // The commit that went is not had any more.
    expectError(await load(page, REPO, { ...options, revision: 'e'.repeat(40) }), 'Fetch', /cannot be reached|no answer/, false);
    await server.start();
  });
}, { seconds: 120 });

test('loading: headers go to the source\'s own server, not to that of its adapter or of a scattered file', async () => {
  const files = tiny('tiny-llama-tied');
  const adapterFiles = Object.fromEntries(Object.entries(files).filter(([file]) => file.startsWith('draft_adapter/')).map(([file, content]) => [file.slice(14), content]));
  const folders = { 'tiny/model': files, 'tiny/adapter': adapterFiles };
  const [home, away] = [await faultServer(folders), await faultServer(folders)];
  try {
    const page = await blankPage('stock');
    await page.setContent('<input id="files" type="file" multiple webkitdirectory>');
    await page.setInputFiles('#files', path.join(ROOT, 'tests/golden/tiny-llama-tied'));
    const headers = { Authorization: 'Bearer secret', 'X-Token': 'secret' };
    const model = (server) => `${server.url}/tiny/model/`;
    const adapter = (server) => `${server.url}/tiny/adapter/`;
    const scattered = (weights, drafter) => ({
      ...Object.fromEntries(['config.json', WEIGHTS].map((file) => [file, model(weights) + file])),
      ...Object.fromEntries(Object.keys(adapterFiles).map((file) => [`draft_adapter/${file}`, adapter(drafter) + file])),
    });
    const scatteredAdapter = Object.fromEntries(Object.keys(adapterFiles).map((file) => [file, adapter(away) + file]));
    // Which of the two hears the headers: all that it is asked for, or nothing.
    for (const [name, source, options, hears] of [
      ['adapter elsewhere', model(home), { adapter: adapter(away) }, [home]],
      ['adapter elsewhere, of a repo', 'tiny/model', { hubUrl: home.url, adapter: adapter(away) }, [home]],
      ['repo as the adapter of an address elsewhere', model(home), { hubUrl: away.url, adapter: 'tiny/adapter' }, [home]],
      ['scattered files', scattered(home, away), {}, [home]],
      ['scattered adapter', model(home), { adapter: scatteredAdapter }, [home]],
      ['picked files', null, { adapter: adapter(away) }, [away]],
      // Controls: the same server, the same hub.
      ['adapter beside', model(home), { adapter: adapter(home) }, [home]],
      ['two repos', 'tiny/model', { hubUrl: home.url, adapter: 'tiny/adapter' }, [home]],
      ['scattered at home', scattered(home, home), {}, [home]],
    ]) {
      const since = [home, away].map(({ log }) => log.length);
      const outcome = await load(page, source, { store: false, headers, ...options }, { tokens: 1 });
      assert.equal(outcome.error, undefined, `${name}: ${JSON.stringify(outcome.error)}`);
      if (source !== null) assert.notEqual(outcome.info.drafter, null, name);
      for (const [i, server] of [home, away].entries()) {
        const heard = server.log.slice(since[i]).map(({ headers }) => [headers.authorization, headers['x-token']]);
        if (server === away && options.adapter !== undefined && name.includes('elsewhere')) assert.ok(heard.length > 0, name);
        for (const tokens of heard) assert.deepEqual(tokens, hears.includes(server) ? ['Bearer secret', 'secret'] : [undefined, undefined], `${name}: ${server === home ? 'home' : 'away'}`);
      }
    }
  } finally {
    await home.stop();
    await away.stop();
  }
}, { seconds: 90 });

test('loading: a load that is stopped while its worker is busy, and begun again at once, is stored', async () => {
  await withServer(async ({ server, page, options }) => {
    server.behave(() => ({ slow: 10 }));
    // A worker that is deaf to `stop`, as one in the middle of a long computation is.
    await page.evaluate(() => {
      const post = Worker.prototype.postMessage;
      Worker.prototype.postMessage = function (command, ...rest) {
        if (command.type !== 'stop') return post.call(this, command, ...rest);
      };
    });
    const first = load(page, REPO, options, { stopAt: { phase: 'download', bytes: 1 << 20 } });
    const until = Date.now() + 30_000;
    while (server.weightBytes() < 2 << 20 && Date.now() < until) await new Promise((resolve) => setTimeout(resolve, 20));
    const since = server.log.length;
    server.behave();
    const second = await load(page, REPO, options);
    expectError(await first, 'Aborted', /stopped/, false);
    expectLoaded(second);
    assert.deepEqual(codes(second), []);
    assert.deepEqual(second.stored.map(({ complete }) => complete), [true]);
    const [weights] = server.log.slice(since).filter(({ file }) => file === WEIGHTS);
    assert.ok(weights.from > 0, 'it did not go on where the first was ended');
  });
}, { seconds: 90 });

test('loading: on the CPU, more than WebAssembly addresses is refused before a byte of a weight is sent', async () => {
  const shape = { hidden: 4096, ffn: 14_336, heads: 32, kvHeads: 8, layers: 32, vocab: 32_000 };
  await withServer(async ({ server, page, options }) => {
    const size = server.sizeOf('big', WEIGHTS);
    assert.ok(size > 13e9, `${size} bytes`);
    const big = `${server.url}/big/`;
    const plain = { ...options, quantize: undefined };
    const looked = await look(page, big, plain);
    assert.deepEqual([looked.available, looked.backend, looked.limit], [false, 'cpu', 'WebAssembly'], looked.reason);
    assert.match(looked.reason, /4294967296/);
    expectError(await load(page, big, plain), 'Unsupported', /on the CPU this model takes \d+ bytes.*4294967296/);
    assert.ok(server.weightBytes() < 1 << 20, `${server.weightBytes()} bytes of weights were sent`);
    // Control: the same checkpoint with fewer layers.
    const less = await look(page, `${server.url}/less/`, plain);
    assert.deepEqual([less.available, less.limit], [true, null], less.reason);
  }, { folders: { big: madeUpCheckpoint(shape), less: madeUpCheckpoint({ ...shape, layers: 4 }) } });
});

test('loading: golden checkpoints by address, from a hub with their adapter, and picked: the reference\'s ids each time', async () => {
  const name = 'tiny-llama-tied';
  const golden = JSON.parse(fs.readFileSync(path.join(ROOT, 'tests/golden', name, 'golden.json'), 'utf8'));
  const { prompt, tokens } = golden.greedy[0];
  await withServer(async ({ server, page, options }) => {
    await page.setContent('<input id="files" type="file" multiple webkitdirectory><input id="adapter" type="file" multiple>');
    await page.setInputFiles('#files', path.join(ROOT, 'tests/golden', name));
    const all = await page.evaluate(
      async ({ sources, prompt, count }) => {
        const { load } = await import('/pkg/dist/index.js');
        const run = async (source, options) => {
          const model = await load(source, { backend: 'cpu', ...options });
          const { tokens } = await model.generate({ tokens: prompt }, { maxTokens: count, ignoreEos: true, schedule: model.info.drafter ? 'packed' : undefined }).result;
          await model.dispose();
          return { tokens, drafts: model.info.drafter !== null };
        };
        const picked = document.getElementById('files').files;
        const flat = [...picked].filter((file) => !file.webkitRelativePath.includes('draft_adapter'));
        return {
          ...Object.fromEntries(await Promise.all(Object.entries(sources).map(async ([name, [source, options]]) => [name, await run(source, options)]))),
          picked: await run(picked),
          mixed: await run(flat, { adapter: [...picked].filter((file) => file.webkitRelativePath.includes('draft_adapter')) }),
        };
      },
      {
        sources: {
          address: [`${server.url}/tiny/model/`, {}],
          hub: ['tiny/model@main', { hubUrl: options.hubUrl }],
          apart: ['tiny/model', { hubUrl: options.hubUrl, adapter: `${server.url}/tiny/model/draft_adapter/` }],
          scattered: [Object.fromEntries(['config.json', WEIGHTS, 'draft_adapter/adapter_config.json', 'draft_adapter/adapter_model.safetensors'].map((file) => [file, `${server.url}/tiny/model/${file}`])), {}],
        },
        prompt,
        count: tokens.length,
      },
    );
    for (const [how, { tokens: ids, drafts }] of Object.entries(all)) {
      assert.deepEqual(ids, tokens, how);
      assert.equal(drafts, true, how);
    }
  }, { folders: { 'tiny/model': tiny(name) } });
}, { seconds: 90 });
