// A server of checkpoints that can be told to misbehave, and that is a hub as well. Files may be made up as they are sent,
// so they can be large without being anywhere.
//
//   GET /{folder}/{file}                                      a folder of files
//   GET /api/models/{owner}/{name}/revision/{revision}        a hub's listing of a folder named `owner/name`
//   GET /{owner}/{name}/resolve/{commit}/{file}               sends on to the file's own address, as hubs do

import { createHash } from 'node:crypto';
import fs from 'node:fs';
import http from 'node:http';
import path from 'node:path';

export const COMMIT = '0123456789abcdef0123456789abcdef01234567';
/** Bytes per write: small enough that a file can be cut anywhere. */
const PIECE = 64 << 10;

/** A file that is a buffer. */
export const held = (bytes) => ({ size: bytes.length, read: (start, end) => bytes.subarray(start, end) });

/** All files of a folder, and of those in it. */
export function folder(root, under = '') {
  const files = {};
  for (const entry of fs.readdirSync(path.join(root, under), { withFileTypes: true })) {
    const name = under + entry.name;
    if (entry.isDirectory()) Object.assign(files, folder(root, `${name}/`));
    else files[name] = held(fs.readFileSync(path.join(root, name)));
  }
  return files;
}

/** SHA-256 of a file, in hexadecimal. */
export function sha256({ size, read }) {
  const hash = createHash('sha256');
  for (let at = 0; at < size; at += 1 << 20) hash.update(read(at, Math.min(size, at + (1 << 20))));
  return hash.digest('hex');
}

/**
 * Starts the server. `folders` are files by name, by folder. `manner(request, file)` may return how to misbehave:
 *
 * - `status`: that answer instead; `html`: a web page with 200
 * - `cut`: the connection breaks after so many bytes; `stall`: it falls silent after so many
 * - `whole`: ranges are refused, the file is sent from its start; `ranges: 'wrong'`: sent from its start, and called otherwise
 * - `size`: what is said of its size; `etag`: another version; `flip`: the byte at this place is another one
 * - `slow`: milliseconds before each piece
 *
 * `cdn` is the address of another such server, to which a hub sends on. `log` has an entry per GET of a file: `{ folder, file, from, sent, status, headers }`.
 */
export async function faultServer(folders, { hashes = {}, cdn = '' } = {}) {
  const log = [];
  const state = { manner: () => null };
  let port = 0;
  let server;

  const cors = { 'access-control-allow-origin': '*', 'access-control-allow-headers': '*', 'access-control-expose-headers': 'Content-Range, ETag' };
  const preflights = [];

  async function answer(request, response) {
    for (const [name, value] of Object.entries(cors)) response.setHeader(name, value);
    const url = new URL(request.url, 'http://x');
    if (request.method === 'OPTIONS') {
      preflights.push(request.headers['access-control-request-headers']);
      return response.writeHead(204).end();
    }
    const listing = /^\/api\/models\/([^/]+\/[^/]+)\/revision\/([^/]+)$/.exec(url.pathname);
    if (listing) return list(listing[1], request, response);
    const resolve = /^\/([^/]+\/[^/]+)\/resolve\/([^/]+)\/(.+)$/.exec(url.pathname);
    if (resolve) return response.writeHead(302, { location: `${cdn}/${resolve[1]}/${resolve[3]}` }).end();
    const name = Object.keys(folders).find((folder) => url.pathname.startsWith(`/${folder}/`));
    const file = name && decodeURIComponent(url.pathname.slice(name.length + 2));
    const content = name && folders[name][file];
    const how = state.manner({ folder: name, file, path: url.pathname, headers: request.headers, range: request.headers.range, nth: log.filter((seen) => seen.file === file).length }) ?? {};
    const entry = { folder: name, file, from: 0, sent: 0, status: 0, headers: request.headers };
    log.push(entry);
    const reply = (status, headers = {}, body = '') => {
      entry.status = status;
      response.writeHead(status, headers).end(body);
    };
    if (how.status) return reply(how.status, { 'content-length': 0 });
    if (how.html) return reply(200, { 'content-type': 'text/html; charset=utf-8' }, '<!doctype html><title>Welcome</title>');
    if (!content) return reply(404, { 'content-length': 0 });
    await send(request, response, content, how, entry);
  }

  function list(repo, request, response) {
    const how = state.manner({ path: request.url, repo, headers: request.headers }) ?? {};
    if (how.status) return response.writeHead(how.status).end();
    if (how.html) return response.writeHead(200, { 'content-type': 'text/html' }).end('<html>');
    if (!folders[repo]) return response.writeHead(404).end();
    const siblings = Object.entries(folders[repo]).map(([rfilename, file]) => ({
      rfilename,
      size: file.size,
      ...(rfilename.endsWith('.safetensors') && { lfs: { sha256: (hashes[`${repo}/${rfilename}`] ??= sha256(file)), size: file.size } }),
    }));
    response.writeHead(200, { 'content-type': 'application/json' }).end(JSON.stringify({ id: repo, sha: how.commit ?? COMMIT, siblings }));
  }

  async function send(request, response, { size, read }, how, entry) {
    const asked = how.whole ? null : /^bytes=(\d+)-(\d*)$/.exec(request.headers.range ?? '');
    const start = asked ? Number(asked[1]) : 0;
    const end = Math.min(size, asked?.[2] ? Number(asked[2]) + 1 : size);
    const headers = { etag: how.etag ?? '"1"', 'content-type': 'application/octet-stream', ...(!how.whole && { 'accept-ranges': 'bytes' }) };
    if (asked && start >= size && size > 0) {
      entry.status = 416;
      return response.writeHead(416, { ...headers, 'content-range': `bytes */${size}` }).end();
    }
    const said = how.size ?? size;
    const from = how.ranges === 'wrong' ? 0 : start;
    headers['content-length'] = how.size !== undefined && !asked ? said : end - start;
    if (asked) headers['content-range'] = `bytes ${from}-${from + end - start - 1}/${said}`;
    entry.status = asked ? 206 : 200;
    entry.from = start;
    response.writeHead(entry.status, headers);
    response.flushHeaders();
    for (let at = start; at < end && !response.destroyed; at += PIECE) {
      if (how.slow) await new Promise((resolve) => setTimeout(resolve, how.slow));
      let piece = read(at, Math.min(end, at + PIECE));
      const limit = Math.min(how.cut ?? Infinity, how.stall ?? Infinity) - entry.sent;
      if (limit < piece.length) piece = piece.subarray(0, Math.max(0, limit));
      if (how.flip >= at && how.flip < at + piece.length) {
        piece = Buffer.from(piece);
        piece[how.flip - at] ^= 1;
      }
      entry.sent += piece.length;
      const room = response.write(piece);
      if (limit <= piece.length && how.stall !== undefined) return;
      if (limit <= piece.length) return setTimeout(() => response.destroy(), 20);
      if (!room) await drained(response);
    }
    response.end();
  }

  async function start() {
    server = http.createServer((request, response) => answer(request, response).catch((error) => response.destroy(error)));
    await new Promise((resolve, reject) => server.once('error', reject).listen(port, '127.0.0.1', resolve));
    port = server.address().port;
  }
  async function stop() {
    server.closeAllConnections();
    await new Promise((resolve) => server.close(resolve));
  }

  await start();
  return {
    url: `http://127.0.0.1:${port}`,
    log,
    preflights,
    sizeOf: (folder, file) => folders[folder][file].size,
    /** Bytes sent of the weights since the log's entry `since`. */
    weightBytes: (since = 0) => log.slice(since).filter(({ file }) => file?.endsWith('.safetensors')).reduce((sum, { sent }) => sum + sent, 0),
    behave: (manner = () => null) => (state.manner = manner),
    start,
    stop,
  };
}

function drained(response) {
  return new Promise((resolve) => {
    const done = () => {
      response.off('drain', done).off('close', done);
      resolve();
    };
    response.on('drain', done).on('close', done);
  });
}

// ---- A checkpoint of any size --------------------------------------------------------------------------------------

/**
 * A Llama of the given shape in bf16, as files that are made up as they are read: every matrix is the same stretch of random
 * numbers over and over. `sorted`: in 8-bit groups of 64, in the order in which safetensors writes them, by type, so that all
 * scales lie behind all weights.
 */
export function madeUpCheckpoint({ hidden, ffn, heads, kvHeads, layers, vocab, sorted = false }) {
  const headDim = hidden / heads;
  const tensors = [['model.embed_tokens.weight', [vocab, hidden]]];
  for (let i = 0; i < layers; i++) {
    const name = (what) => `model.layers.${i}.${what}.weight`;
    const kv = [kvHeads * headDim, hidden];
    tensors.push([name('self_attn.q_proj'), [hidden, hidden]], [name('self_attn.k_proj'), kv], [name('self_attn.v_proj'), kv], [name('self_attn.o_proj'), [hidden, hidden]]);
    tensors.push([name('mlp.gate_proj'), [ffn, hidden]], [name('mlp.up_proj'), [ffn, hidden]], [name('mlp.down_proj'), [hidden, ffn]]);
  }
  if (sorted) {
    const scales = tensors.flatMap(([name, [rows, inputs]]) => ['scales', 'biases'].map((what) => [name.replace(/weight$/, what), [rows, inputs / 64]]));
    for (const tensor of tensors) [tensor[1], tensor[2]] = [[tensor[1][0], tensor[1][1] / 4], 'U32'];
    tensors.push(...scales);
  }
  const matrices = tensors.length;
  for (let i = 0; i < layers; i++) for (const norm of ['input_layernorm', 'post_attention_layernorm']) tensors.push([`model.layers.${i}.${norm}.weight`, [hidden]]);
  tensors.push(['model.norm.weight', [hidden]]);

  const header = {};
  let at = 0;
  let firstNorm = 0;
  tensors.forEach(([name, shape, dtype = 'BF16'], i) => {
    if (i === matrices) firstNorm = at;
    const bytes = (dtype === 'U32' ? 4 : 2) * shape.reduce((a, b) => a * b);
    header[name] = { dtype, shape, data_offsets: [at, at + bytes] };
    at += bytes;
  });
  let text = JSON.stringify(header);
  text += ' '.repeat((8 - (text.length % 8)) % 8);
  const head = Buffer.alloc(8 + text.length);
  head.writeBigUInt64LE(BigInt(text.length));
  head.write(text, 8);

  // A period that is no multiple of a row, so that rows differ.
  const period = Buffer.alloc(2 * 499_979);
  for (let i = 0, seed = 1; i < period.length; i += 2) {
    seed = (Math.imul(seed, 1_664_525) + 1_013_904_223) >>> 0;
    const value = new DataView(Float32Array.of(seed / 2 ** 32 / 8 - 1 / 16).buffer).getUint16(2, true);
    period.writeUInt16LE(value, i);
  }
  const one = Buffer.from([0x80, 0x3f]);
  const size = head.length + at;
  const read = (start, end) => {
    const out = Buffer.alloc(end - start);
    for (let place = start; place < end; ) {
      const inData = place - head.length;
      let piece;
      if (inData < 0) piece = head.subarray(place);
      else if (inData < firstNorm) piece = period.subarray(inData % period.length, (inData % period.length) + firstNorm - inData);
      else piece = one.subarray(inData % 2);
      place += piece.copy(out, place - start, 0, end - place);
    }
    return out;
  };
  const config = {
    architectures: ['LlamaForCausalLM'], model_type: 'llama', hidden_act: 'silu', attention_bias: false, mlp_bias: false, rms_norm_eps: 1e-5, vocab_size: vocab, hidden_size: hidden, intermediate_size: ffn,
    num_hidden_layers: layers, num_attention_heads: heads, num_key_value_heads: kvHeads, head_dim: headDim, tie_word_embeddings: true, max_position_embeddings: 512, rope_theta: 10000, bos_token_id: 1, eos_token_id: 2, torch_dtype: 'bfloat16',
    ...(sorted && { quantization: { group_size: 64, bits: 8 } }),
  };
  return { 'config.json': held(Buffer.from(JSON.stringify(config))), 'model.safetensors': { size, read } };
}
