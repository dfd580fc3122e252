// The demo server: what a page and the loader rely on, asked over a real connection.

import assert from 'node:assert/strict';
import fs from 'node:fs';
import http from 'node:http';
import os from 'node:os';
import path from 'node:path';
import { after, before, test } from 'node:test';
import { parsePort, serve } from '../../tools/serve.mjs';

let folder, server, isolated;

before(async () => {
  folder = fs.mkdtempSync(path.join(os.tmpdir(), 'forecall-serve-'));
  const write = (name, text) => {
    fs.mkdirSync(path.dirname(path.join(folder, name)), { recursive: true });
    fs.writeFileSync(path.join(folder, name), text);
  };
  write('secret.txt', 'not served');
  write('www/index.html', '<!doctype html><title>demo</title>');
  write('www/.hidden', 'not served');
  write('www/deep/index.html', 'deep');
  write('pkg/forecall.js', 'export {}');
  write('pkg/forecall_bg.wasm', '\0asm');
  write('models/tiny/config.json', '{}');
  write('models/tiny/model.safetensors', '0123456789');
  const mounts = { '/': `${folder}/www`, '/pkg/': `${folder}/pkg`, '/models/': `${folder}/models` };
  server = await serve({ mounts });
  isolated = await serve({ mounts, isolate: true });
});

after(async () => {
  await Promise.all([server.close(), isolated.close()]);
  fs.rmSync(folder, { recursive: true });
});

/** A request whose path goes out exactly as given: fetch() would tidy it up. */
function raw(requestPath, { method = 'GET', headers = {}, port = server.port } = {}) {
  return new Promise((resolve, reject) => {
    const request = http.request({ host: '127.0.0.1', port, path: requestPath, method, headers }, (response) => {
      let body = '';
      response.on('data', (chunk) => (body += chunk));
      response.on('end', () => resolve({ status: response.statusCode, headers: response.headers, body }));
    });
    request.on('error', reject).end();
  });
}

test('each mount is served with its MIME type', async () => {
  for (const [url, type, body] of [
    ['/', 'text/html; charset=utf-8', '<!doctype html><title>demo</title>'],
    ['/?model=/models/tiny/', 'text/html; charset=utf-8', '<!doctype html><title>demo</title>'],
    ['/pkg/forecall.js', 'text/javascript; charset=utf-8', 'export {}'],
    ['/pkg/forecall_bg.wasm', 'application/wasm', '\0asm'],
    ['/models/tiny/config.json', 'application/json; charset=utf-8', '{}'],
    ['/models/tiny/model.safetensors', 'application/octet-stream', '0123456789'],
  ]) {
    const got = await raw(url);
    assert.deepEqual([got.status, got.headers['content-type'], got.body], [200, type, body], url);
  }
});

test('HEAD gives the size and no body', async () => {
  const got = await raw('/models/tiny/model.safetensors', { method: 'HEAD' });
  assert.deepEqual([got.status, got.headers['content-length'], got.headers['accept-ranges'], got.body], [200, '10', 'bytes', '']);
});

test('byte ranges', async () => {
  const range = (value) => raw('/models/tiny/model.safetensors', { headers: { Range: value } });
  for (const [asked, answered, body] of [
    ['bytes=2-4', 'bytes 2-4/10', '234'],
    ['bytes=7-', 'bytes 7-9/10', '789'],
    ['bytes=-2', 'bytes 8-9/10', '89'],
    ['bytes=8-99', 'bytes 8-9/10', '89'],
  ]) {
    const got = await range(asked);
    assert.deepEqual([got.status, got.headers['content-range'], got.body], [206, answered, body], asked);
  }
  const beyond = await range('bytes=10-');
  assert.deepEqual([beyond.status, beyond.headers['content-range']], [416, 'bytes */10']);
});

test('an ETag answers 304 while the file is the same, and If-Range starts over when it is not', async () => {
  const url = '/models/tiny/model.safetensors';
  const { etag } = (await raw(url)).headers;
  assert.ok(etag);
  assert.equal((await raw(url, { headers: { 'If-None-Match': etag } })).status, 304);
  assert.equal((await raw(url, { headers: { 'If-Range': etag, Range: 'bytes=0-1' } })).status, 206);
  fs.writeFileSync(path.join(folder, 'models/tiny/model.safetensors'), 'abcdefghijk');
  const changed = await raw(url, { headers: { 'If-Range': etag, Range: 'bytes=0-1' } });
  assert.deepEqual([changed.status, changed.body], [200, 'abcdefghijk']);
  assert.equal((await raw(url, { headers: { 'If-None-Match': etag } })).status, 200);
  fs.writeFileSync(path.join(folder, 'models/tiny/model.safetensors'), '0123456789');
});

test('nothing outside the folders can be reached', async () => {
  for (const url of [
    '/../secret.txt',
    '/pkg/../../secret.txt',
    '/%2e%2e/secret.txt',
    '/pkg/%2e%2e%2f%2e%2e%2fsecret.txt',
    '/models/..%5c..%5csecret.txt',
    '//../secret.txt',
    '/.hidden',
    '/secret.txt',
    '/%00',
    '/%',
    '/pkg',
  ]) {
    const got = await raw(url);
    assert.ok([400, 403, 404].includes(got.status), `${url} gave ${got.status}`);
    assert.notEqual(got.body, 'not served', url);
  }
});

test('a folder without its slash is sent to the one with it, on this server only', async () => {
  const got = await raw('/deep');
  assert.deepEqual([got.status, got.headers.location], [301, '/deep/']);
  const tricky = await raw('//deep');
  assert.ok(!tricky.headers.location?.startsWith('//'), `redirects to ${tricky.headers.location}`);
});

test('other methods are refused', async () => {
  const got = await raw('/', { method: 'POST' });
  assert.deepEqual([got.status, got.headers.allow], [405, 'GET, HEAD']);
});

test('cross-origin isolation is off unless asked for', async () => {
  assert.equal((await raw('/')).headers['cross-origin-opener-policy'], undefined);
  const { headers } = await raw('/', { port: isolated.port });
  assert.equal(headers['cross-origin-opener-policy'], 'same-origin');
  assert.equal(headers['cross-origin-embedder-policy'], 'require-corp');
});

test('a taken port and a bad port are told plainly', async () => {
  await assert.rejects(serve({ port: server.port }), /port \d+ is taken/);
  assert.equal(parsePort('0'), 0);
  assert.throws(() => parsePort('80a'), /from 0 to 65535, got "80a"/);
  assert.throws(() => parsePort('70000'), /from 0 to 65535/);
});
