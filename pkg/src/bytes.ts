// Bytes of a checkpoint over HTTP, asked for by range and never held as a whole.
//
// The loader reads a file's ranges mostly in order. So a read opens a range and, once reads follow each other, leaves
// the response open to the file's end and takes from the stream as the loader asks: one request a file, and the
// network stays busy while the last chunk is being uploaded. A connection that breaks is taken up where it stopped.
// Servers that refuse ranges are read from the start in one stream, skipping what nobody asked for.

import { ForecallError } from './errors.js';

/** Random access to a checkpoint's files. Paths are relative, with `/`. */
export interface ByteSource {
  /** Bytes in the file. Rejects with `Fetch`, `missing: true` where there is no such file. */
  size(file: string): Promise<number>;
  /** Bytes `start..end` (end not included), all of them or a `Fetch` error. */
  read(file: string, start: number, end: number): Promise<Uint8Array>;
  /** Drops open connections. */
  close(): void;
}

/** Options of {@link httpSource}. */
export interface HttpOptions {
  headers?: Record<string, string>;
  /** Told of every byte that arrives and is wanted, and of every file's size once. */
  onBytes?: (file: string, newBytes: number) => void;
  onSize?: (file: string, bytes: number) => void;
}

/** How often a broken connection is taken up again without a byte of progress in between. */
const RETRIES = 3;
const RETRY_DELAY_MS = 250;
/** A gap up to this is read and dropped; past it a new request is cheaper. */
const SKIP_BYTES = 1 << 20;

interface Stream {
  reader: ReadableStreamDefaultReader<Uint8Array>;
  /** Offset in the file of the next byte the stream gives. */
  at: number;
  /** Where the response ends: `Infinity` to the file's end. */
  until: number;
  /** Received, not yet handed out. */
  rest: Uint8Array;
}

interface FileState {
  url: string;
  size: number;
  etag: string | null;
  ranges: boolean;
  /** Where the last read ended: the next one that starts here is sequential. */
  lastEnd: number;
  stream: Stream | null;
}

/** Files below the folder `base` (a URL that ends in a slash). */
export function httpSource(base: string, options: HttpOptions = {}): ByteSource {
  const files = new Map<string, Promise<FileState>>();
  const open = (file: string): Promise<FileState> => {
    let state = files.get(file);
    if (!state) {
      state = openFile(file, new URL(file, base).href, options.headers ?? {});
      files.set(file, state);
      state.then(
        ({ size }) => options.onSize?.(file, size),
        () => files.delete(file), // a later call may try again
      );
    }
    return state;
  };

  return {
    size: async (file) => (await open(file)).size,
    read: async (file, start, end) => {
      const state = await open(file);
      if (!Number.isSafeInteger(start) || !Number.isSafeInteger(end) || start < 0 || end < start) {
        throw new ForecallError('Internal', `a range ${start}..${end} of ${file} was asked for`, { file });
      }
      if (end > state.size) {
        throw new ForecallError(
          'Fetch',
          `${file} has ${state.size} bytes, but bytes ${start} to ${end} are needed: it is truncated. Upload the whole file (${state.url}).`,
          { file, url: state.url },
        );
      }
      return readRange(file, state, start, end, options);
    },
    close: () => {
      for (const state of files.values()) state.then(drop, () => {});
      files.clear();
    },
  };
}

function drop(state: FileState): void {
  state.stream?.reader.cancel().catch(() => {});
  state.stream = null;
}

/** Learns a file's size from a request for its first byte. A server that sends the whole file instead is read from that stream. */
async function openFile(file: string, url: string, headers: Record<string, string>): Promise<FileState> {
  const response = await request(file, url, headers, 'bytes=0-0');
  const state: FileState = { url, size: 0, etag: response.headers.get('etag'), ranges: true, lastEnd: -1, stream: null };

  if (response.status === 206) {
    await response.body?.cancel();
    const total = /\/(\d+)$/.exec(response.headers.get('content-range') ?? '')?.[1];
    state.size = total === undefined ? await sizeByHead(file, url, headers) : Number(total);
    return state;
  }

  // 416 is how an empty file answers a request for its first byte.
  if (response.status === 416) return state;

  state.ranges = false;
  const length = response.headers.get('content-encoding') ? null : response.headers.get('content-length');
  if (length !== null && response.body) {
    state.size = Number(length);
    state.stream = { reader: response.body.getReader(), at: 0, until: Infinity, rest: new Uint8Array() };
    return state;
  }
  // Compressed or of unknown length: fine for small text files, which are held; weights are not.
  const bytes = await held(file, url, response);
  state.size = bytes.length;
  state.stream = { reader: new ReadableStream<Uint8Array>({ start: (c) => c.close() }).getReader(), at: bytes.length, until: Infinity, rest: bytes };
  return state;
}

const HELD_BYTES = 64 << 20;

async function held(file: string, url: string, response: Response): Promise<Uint8Array> {
  const parts: Uint8Array[] = [];
  let size = 0;
  const reader = response.body?.getReader();
  for (let next = await reader?.read(); next && !next.done; next = await reader?.read()) {
    parts.push(next.value);
    size += next.value.length;
    if (size > HELD_BYTES) {
      await reader?.cancel();
      throw new ForecallError('Fetch', `${file} comes compressed or without a length, and without byte ranges, so it cannot be read in pieces: serve it uncompressed, with Content-Length (${url}).`, { file, url });
    }
  }
  return concat(parts, size);
}

/** For servers that give ranges but, across origins, do not let the page see Content-Range. */
async function sizeByHead(file: string, url: string, headers: Record<string, string>): Promise<number> {
  const size = await sizeWithoutBody(url, url, headers);
  if (size !== null) return size;
  throw new ForecallError('Fetch', `the size of ${file} cannot be seen: let the server send Access-Control-Expose-Headers: Content-Range (${url}).`, { file, url });
}

/** One request, with its refusals as errors. The answer is 200, 206 or 416. */
async function request(file: string, url: string, headers: Record<string, string>, range: string | null, method = 'GET'): Promise<Response> {
  let response: Response;
  try {
    // No referrer: some hubs refuse those of pages they do not know.
    response = await fetch(url, { method, headers: range === null ? headers : { ...headers, Range: range }, referrerPolicy: 'no-referrer' });
  } catch (cause) {
    throw new ForecallError('Fetch', `${file} cannot be reached at ${url}: no answer, or the server does not allow this page (CORS). Check the address and the connection.`, { file, url }, { cause });
  }
  const { status } = response;
  if (status === 416 && range !== null) {
    await response.body?.cancel();
    return response;
  }
  if (status !== 200 && status !== 206) {
    await response.body?.cancel();
    const missing = status === 404 || status === 410;
    const advice = missing ? 'Check the address of the model.' : status === 401 || status === 403 ? 'It needs permission: pass `headers`.' : 'Try again later.';
    throw new ForecallError('Fetch', `${file}: the server answered ${status}${response.statusText ? ` (${response.statusText})` : ''} for ${url}. ${advice}`, { file, url, status, missing });
  }
  // Hosts of single-page sites answer a missing file with their start page.
  if (/^\s*(text\/html|application\/xhtml)/i.test(response.headers.get('content-type') ?? '')) {
    await response.body?.cancel();
    throw new ForecallError('Fetch', `${file}: the server answered with a web page (HTML) for ${url}, so there is most likely no such file. Check the address of the model.`, { file, url, status, missing: true });
  }
  return response;
}

async function readRange(file: string, state: FileState, start: number, end: number, options: HttpOptions): Promise<Uint8Array> {
  const out = new Uint8Array(end - start);
  let filled = 0;
  let failures = 0;
  while (filled < out.length) {
    const at = start + filled;
    try {
      const stream = await streamAt(file, state, at, end, options.headers ?? {});
      if (stream.rest.length === 0) {
        const next = await stream.reader.read();
        if (next.done) throw new ForecallError('Fetch', `${file} ended after ${stream.at} of its ${state.size} bytes (${state.url}): the connection broke, or the file is truncated. Try again.`, { file, url: state.url });
        stream.rest = next.value;
      }
      const skip = Math.min(stream.rest.length, at - stream.at);
      const take = Math.min(stream.rest.length - skip, out.length - filled);
      out.set(stream.rest.subarray(skip, skip + take), filled);
      stream.rest = stream.rest.subarray(skip + take);
      stream.at += skip + take;
      filled += take;
      if (take > 0) {
        failures = 0;
        options.onBytes?.(file, take);
      }
      if (stream.at >= stream.until) drop(state);
    } catch (error) {
      drop(state);
      failures += 1;
      const known = error instanceof ForecallError ? error : null;
      const final = known?.status !== undefined && known.status < 500;
      if (final) throw known;
      if (failures > RETRIES) {
        throw known ?? new ForecallError('Fetch', `the connection broke ${failures} times in a row while ${file} was read, at byte ${at} of ${state.size} (${state.url}). Try again.`, { file, url: state.url }, { cause: error });
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_DELAY_MS * 2 ** failures));
    }
  }
  state.lastEnd = end;
  return out;
}

/** The file's open stream if it stands at or shortly before `at`, else a new one. */
async function streamAt(file: string, state: FileState, at: number, end: number, headers: Record<string, string>): Promise<Stream> {
  const open = state.stream;
  if (open && open.at <= at && open.until >= end && (!state.ranges || at - open.at <= SKIP_BYTES)) return open;
  drop(state);

  // A read that follows the last one promises more of the same: leave the range open.
  const sequential = state.ranges && at === state.lastEnd;
  const range = state.ranges ? `bytes=${at}-${sequential ? '' : end - 1}` : null;
  const response = await request(file, state.url, headers, range);
  if (response.status === 416) throw new ForecallError('Fetch', `${file} became shorter while it was read (${state.url}). Load the model again.`, { file, url: state.url, status: 416 });
  if (response.headers.get('etag') !== state.etag) {
    await response.body?.cancel();
    throw new ForecallError('Fetch', `${file} changed on the server while it was read (${state.url}). Load the model again.`, { file, url: state.url, status: response.status });
  }
  const from = response.status === 206 ? at : 0;
  const came = /^bytes (\d+)-/.exec(response.headers.get('content-range') ?? '')?.[1];
  if (response.status === 206 && came !== undefined && Number(came) !== at) {
    await response.body?.cancel();
    throw new ForecallError('Fetch', `${file}: byte ${at} was asked for and byte ${came} came (${state.url}): the server's ranges are broken.`, { file, url: state.url, status: 206 });
  }
  if (!response.body) throw new ForecallError('Fetch', `${file}: the server's answer is empty (${state.url}).`, { file, url: state.url, status: response.status });
  state.stream = { reader: response.body.getReader(), at: from, until: response.status === 206 && !sequential ? end : Infinity, rest: new Uint8Array() };
  return state.stream;
}

/** A file's size by a request without a body; `null` where the server does not say. Rejects like {@link ByteSource.size}. */
export async function sizeWithoutBody(base: string, file: string, headers: Record<string, string>): Promise<number | null> {
  const response = await request(file, new URL(file, base).href, headers, null, 'HEAD');
  const length = response.headers.get('content-encoding') ? null : response.headers.get('content-length');
  return length === null ? null : Number(length);
}

function concat(parts: Uint8Array[], size: number): Uint8Array {
  const out = new Uint8Array(size);
  let at = 0;
  for (const part of parts) {
    out.set(part, at);
    at += part.length;
  }
  return out;
}
