// The byte source against servers that behave, and servers that do not.

import assert from 'node:assert/strict';
import http from 'node:http';
import { gzipSync } from 'node:zlib';
import { test } from './harness.mjs';

const { httpSource } = await import('../../pkg/dist/bytes.js');

const BLOCK = 4096;
const FILE = Buffer.from(Uint8Array.from({ length: 50_001 }, (_, i) => (i * 31 + (i >> 8)) & 255));
const HTML = '<!doctype html><title>Not here</title>';

/** Serves FILE at every path but /missing*, in the manner asked for; counts the bytes it sends. */
async function server(manner, body) {
  const seen = { requests: [], bytes: 0 };
  const listener = http.createServer((request, response) => {
    seen.requests.push(request.headers.range ?? null);
    if (request.url.startsWith('/missing')) return response.writeHead(404).end();
    manner(request, response, seen);
  });
  await new Promise((resolve) => listener.listen(0, '127.0.0.1', resolve));
  const source = httpSource(`http://127.0.0.1:${listener.address().port}/`, { blockBytes: BLOCK, onBytes: (_, bytes) => (seen.bytes += bytes) });
  try {
    await body(source, seen);
  } finally {
    source.close();
    listener.closeAllConnections();
    await new Promise((resolve) => listener.close(resolve));
  }
}

/** Start and end (not included) of a request's range; the whole file without one. */
function asked(request) {
  const [, start, end] = /^bytes=(\d+)-(\d*)$/.exec(request.headers.range ?? 'bytes=0-');
  return [Number(start), Math.min(FILE.length, end === '' ? FILE.length : Number(end) + 1)];
}

function ranged(request, response, extra = {}) {
  const [start, end] = asked(request);
  response.writeHead(206, { 'content-length': end - start, 'content-range': `bytes ${start}-${end - 1}/${FILE.length}`, etag: '"1"', ...extra });
  response.end(FILE.subarray(start, end));
}
const whole = (request, response) => response.writeHead(200, { 'content-length': FILE.length }).end(FILE);

async function expectRange(source, start, end) {
  const bytes = await source.read('file', start, end);
  assert.ok(Buffer.from(bytes).equals(FILE.subarray(start, end)), `bytes ${start} to ${end} are not those of the file`);
}

/** Reads every byte once, in pieces, in an order in which neighbouring "layers" are swapped. */
async function readLayers(source) {
  for (const layer of [0, 2, 1, 4, 3]) {
    const [from, to] = [layer * 10_000, Math.min(FILE.length, (layer + 1) * 10_000)];
    for (let at = from; at < to; at += 700) await expectRange(source, at, Math.min(to, at + 700));
  }
  await expectRange(source, 50_000, 50_001);
}

const code = (wanted, about) => (error) => {
  assert.equal(error.name, 'ForecallError', String(error.stack));
  assert.equal(error.code, wanted, error.message);
  assert.match(error.message, about);
  return true;
};

test('bytes: ranges in any order, each byte travels once', () =>
  server(ranged, async (source, seen) => {
    assert.equal(await source.size('file'), FILE.length);
    await readLayers(source);
    assert.ok(seen.bytes <= FILE.length + 2 * BLOCK, `${seen.bytes} bytes travelled for a file of ${FILE.length}`);
    assert.equal(await source.size('missing.json'), null);
    await assert.rejects(source.read('missing.json', 0, 1), code('Fetch', /there is no missing\.json/));
    await assert.rejects(source.read('file', 49_000, 50_002), code('Fetch', /has 50001 bytes.*truncated/));
  }));

test('bytes: a server without ranges is read once, whatever the order', () =>
  server(whole, async (source, seen) => {
    assert.equal(await source.size('file'), FILE.length);
    await readLayers(source);
    assert.equal(seen.requests.length, 1, 'the file was asked for more than once');
    // Going back to what was handed out costs a second pass, and is right.
    await expectRange(source, 5, 9000);
    assert.equal(seen.requests.length, 2);
  }));

test('bytes: a connection that breaks is taken up where it stopped', () => {
  let broken = 0;
  return server(
    (request, response) => {
      const [start, end] = asked(request);
      response.writeHead(206, { 'content-length': end - start, 'content-range': `bytes ${start}-${end - 1}/${FILE.length}` });
      if (end - start < 1500 || broken >= 3) return response.end(FILE.subarray(start, end));
      broken += 1;
      response.write(FILE.subarray(start, start + 1000), () => response.destroy());
    },
    async (source, seen) => {
      await readLayers(source);
      assert.equal(broken, 3);
      assert.ok(seen.requests.some((range) => range?.startsWith('bytes=1000-')), 'no request took up the broken one');
    },
  );
});

test('bytes: a server without ranges that breaks is read again from the start', () => {
  let broken = false;
  return server(
    (request, response) => {
      response.writeHead(200, { 'content-length': FILE.length });
      if (broken) return response.end(FILE);
      broken = true;
      response.write(FILE.subarray(0, 30_000), () => setTimeout(() => response.destroy(), 50));
    },
    readLayers,
  );
});

test('bytes: a connection that always breaks is an error that names the file', () =>
  server(
    (request, response) => {
      response.writeHead(206, { 'content-length': 100, 'content-range': `bytes 0-99/${FILE.length}` });
      response.flushHeaders();
      setTimeout(() => response.destroy(), 5);
    },
    (source) => assert.rejects(source.read('file', 0, 10), code('Fetch', /file/)),
  ));

test('bytes: web pages, refusals and silence', async () => {
  await server(
    (request, response) => response.writeHead(200, { 'content-type': 'text/html; charset=utf-8' }).end(HTML),
    async (source) => {
      assert.equal(await source.size('config.json'), null, 'a web page was taken for a file');
    },
  );
  for (const [status, about] of [[403, /403.*permission/], [500, /500.*later/], [429, /429/]]) {
    await server(
      (request, response) => response.writeHead(status).end(),
      (source) => assert.rejects(source.size('file'), code('Fetch', about)),
    );
  }
  await assert.rejects(httpSource('http://127.0.0.1:9/').size('file'), code('Fetch', /cannot be reached/));
});

test('bytes: a file that changes or comes in wrong pieces is refused', async () => {
  let version = 0;
  await server(
    (request, response) => ranged(request, response, { etag: `"${version++ >> 2}"` }),
    (source) => assert.rejects(readLayers(source), code('Fetch', /changed on the server/)),
  );
  await server(
    (request, response) => {
      const [start, end] = asked(request);
      response.writeHead(206, { 'content-length': end - start, 'content-range': `bytes 0-${end - start - 1}/${FILE.length}` });
      response.end(FILE.subarray(0, end - start));
    },
    (source) => assert.rejects(readLayers(source), code('Fetch', /came from byte 0/)),
  );
});

test('bytes: compressed text is read, compressed weights are refused; an empty file is empty', async () => {
  await server(
    (request, response) => response.writeHead(200, { 'content-encoding': 'gzip' }).end(gzipSync(FILE)),
    async (source) => {
      assert.equal(await source.size('file'), FILE.length);
      await readLayers(source);
    },
  );
  await server(
    (request, response) => response.writeHead(200, { 'content-encoding': 'gzip' }).end(gzipSync(Buffer.alloc(20 * BLOCK))),
    (source) => assert.rejects(source.size('file'), code('Fetch', /serve it uncompressed/)),
  );
  await server(
    (request, response) => response.writeHead(416, { 'content-range': 'bytes */0' }).end(),
    async (source) => {
      assert.equal(await source.size('file'), 0);
      assert.equal((await source.read('file', 0, 0)).length, 0);
    },
  );
});
