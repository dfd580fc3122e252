// Bytes of a checkpoint over HTTP, never held as a whole.
//
// The loader reads a matrix at a time: its weights, scales and biases lie in different places of a file, and layers
// need not lie in order. So files are fetched in blocks, a few of which are kept: neighbouring reads share a block, the
// next block is already on its way while the last one is being uploaded, and each byte travels about once.
// A connection that breaks is taken up where it stopped. Servers that refuse ranges send the file once, from its start;
// blocks that pass by before the loader has asked for them are kept until it has.

import { ForecallError } from './errors.js';

/** Random access to a checkpoint's files. Paths are relative, with `/`. */
export interface ByteSource {
  /** Bytes in the file; `null` if there is none of that name. */
  size(file: string): Promise<number | null>;
  /** Bytes `start..end` (end not included), all of them or a `Fetch` error. */
  read(file: string, start: number, end: number): Promise<Uint8Array>;
  /** Drops open connections and kept blocks. */
  close(): void;
}

/** Options of {@link httpSource}. */
export interface HttpOptions {
  headers?: Record<string, string>;
  /** Told of every byte that arrives. */
  onBytes?: (file: string, newBytes: number) => void;
  /** Told of every file's size, once. */
  onSize?: (file: string, bytes: number) => void;
  /** Told why a file counts as not there. */
  onMissing?: (file: string, error: ForecallError) => void;
  /** Size of a block; tests make it small. */
  blockBytes?: number;
}

const BLOCK_BYTES = 4 << 20;
/** Blocks kept of a file: what a matrix's three places and the read-ahead need. */
const KEPT_BLOCKS = 8;
/** How often a broken connection is taken up again without a byte of progress in between. */
const RETRIES = 3;
const RETRY_DELAY_MS = 250;

interface Remote {
  file: string;
  url: string;
  size: number;
  etag: string | null;
  /** Blocks here or on their way, oldest use first. */
  blocks: Map<number, Promise<Uint8Array>>;
  /** Bytes of each block that were handed out: a block handed out whole is let go. */
  handed: Map<number, number>;
  /** The running response of a server that refuses ranges. */
  stream: Stream | null;
  ranges: boolean;
}

/** A whole file's response, cut into blocks as they pass. */
interface Stream {
  next: number;
  take(): Promise<Uint8Array>;
  cancel(): void;
}

/** Files below the folder `base` (a URL that ends in a slash). */
export function httpSource(base: string, options: HttpOptions = {}): ByteSource {
  const source = new HttpSource(base, options);
  return { size: (file) => source.size(file), read: (file, start, end) => source.read(file, start, end), close: () => source.close() };
}

class HttpSource {
  readonly #base: string;
  readonly #options: HttpOptions;
  readonly #blockBytes: number;
  readonly #files = new Map<string, Promise<Remote | null>>();
  readonly #closed = new AbortController();
  /** Reads follow one another: a stream that passes by cannot serve two. */
  #turn: Promise<unknown> = Promise.resolve();

  constructor(base: string, options: HttpOptions) {
    this.#base = base;
    this.#options = options;
    this.#blockBytes = options.blockBytes ?? BLOCK_BYTES;
  }

  async size(file: string): Promise<number | null> {
    return (await this.#open(file))?.size ?? null;
  }

  read(file: string, start: number, end: number): Promise<Uint8Array> {
    const reading = this.#turn.then(() => this.#read(file, start, end));
    this.#turn = reading.catch(() => {});
    return reading;
  }

  async #read(file: string, start: number, end: number): Promise<Uint8Array> {
    const remote = await this.#open(file);
    if (!remote) throw new ForecallError('Fetch', `there is no ${file} at ${this.#base}. Check the address of the model.`, { file, url: new URL(file, this.#base).href, missing: true });
    if (!Number.isSafeInteger(start) || !Number.isSafeInteger(end) || start < 0 || end < start) {
      throw new ForecallError('Internal', `bytes ${start} to ${end} of ${file} were asked for`, { file });
    }
    if (end > remote.size) {
      throw new ForecallError('Fetch', `${file} has ${remote.size} bytes, but bytes ${start} to ${end} are needed: it is truncated. Upload the whole file (${remote.url}).`, { file, url: remote.url });
    }
    const out = new Uint8Array(end - start);
    for (let at = start; at < end; ) {
      const index = Math.floor(at / this.#blockBytes);
      const from = index * this.#blockBytes;
      const block = await this.#block(remote, index);
      const until = Math.min(end, from + block.length);
      out.set(block.subarray(at - from, until - from), at - start);
      this.#handedOut(remote, index, until - at, block.length);
      at = until;
    }
    return out;
  }

  close(): void {
    this.#closed.abort();
    this.#files.clear();
  }

  #open(file: string): Promise<Remote | null> {
    let opening = this.#files.get(file);
    if (!opening) {
      opening = this.#openNew(file);
      this.#files.set(file, opening);
      opening.catch(() => this.#files.delete(file)); // a later call may try again
    }
    return opening;
  }

  /** Asks for the first block, from which the size is learnt as well. */
  async #openNew(file: string): Promise<Remote | null> {
    const url = new URL(file, this.#base).href;
    let response: Response;
    try {
      response = await this.#request(file, url, `bytes=0-${this.#blockBytes - 1}`);
    } catch (error) {
      if (!(error instanceof ForecallError && error.missing)) throw error;
      this.#options.onMissing?.(file, error);
      return null;
    }
    const remote: Remote = { file, url, size: 0, etag: response.headers.get('etag'), blocks: new Map(), handed: new Map(), stream: null, ranges: response.status === 206 };
    // 416 is how an empty file answers a request for its first bytes.
    if (response.status === 416) return remote;
    if (response.status === 206) {
      const total = /\/(\d+)$/.exec(response.headers.get('content-range') ?? '')?.[1];
      this.#sized(remote, total === undefined ? await this.#hiddenSize(file, url) : Number(total));
      this.#keep(remote, 0, this.#fetchBlock(remote, 0, response));
      return remote;
    }
    const length = response.headers.get('content-encoding') ? null : response.headers.get('content-length');
    if (length === null) {
      // Compressed, or of unknown length. Fine for small text files, which are held; weights are not.
      const bytes = await this.#held(file, url, response);
      this.#sized(remote, bytes.length);
      this.#options.onBytes?.(file, bytes.length);
      for (let i = 0; i * this.#blockBytes < bytes.length; i++) remote.blocks.set(i, Promise.resolve(bytes.subarray(i * this.#blockBytes, (i + 1) * this.#blockBytes)));
    } else {
      this.#sized(remote, Number(length));
      remote.stream = this.#streamOf(remote, response);
    }
    return remote;
  }

  /** Before the first byte is counted. */
  #sized(remote: Remote, size: number): void {
    remote.size = size;
    this.#options.onSize?.(remote.file, size);
  }

  /** For servers that give ranges but, across origins, do not let the page see Content-Range. */
  async #hiddenSize(file: string, url: string): Promise<number> {
    const size = await sizeWithoutBody(url, url, this.#options.headers ?? {});
    if (size === null) throw new ForecallError('Fetch', `the size of ${file} cannot be seen: let the server send Access-Control-Expose-Headers: Content-Range (${url}).`, { file, url });
    return size;
  }

  async #held(file: string, url: string, response: Response): Promise<Uint8Array> {
    const bytes = new Uint8Array(await response.arrayBuffer());
    if (bytes.length > 16 * this.#blockBytes) {
      throw new ForecallError('Fetch', `${file} comes compressed or without a length, and without byte ranges, so it cannot be read in pieces: serve it uncompressed, with Content-Length (${url}).`, { file, url });
    }
    return bytes;
  }

  async #request(file: string, url: string, range: string | null): Promise<Response> {
    return request(file, url, range === null ? { ...this.#options.headers } : { ...this.#options.headers, Range: range }, 'GET', this.#closed.signal);
  }

  #block(remote: Remote, index: number): Promise<Uint8Array> {
    const { blocks } = remote;
    let block = blocks.get(index);
    if (block) blocks.delete(index); // to be set again as the youngest
    else block = remote.ranges ? this.#fetchBlock(remote, index, null) : this.#passTo(remote, index);
    this.#keep(remote, index, block);
    const next = index + 1;
    if (remote.ranges && next * this.#blockBytes < remote.size && !blocks.has(next) && !this.#isDone(remote, next)) this.#keep(remote, next, this.#fetchBlock(remote, next, null));
    return block;
  }

  #keep(remote: Remote, index: number, block: Promise<Uint8Array>): void {
    remote.blocks.set(index, block);
    // A failed block is asked for again by the next read; what was read ahead may fail unheard.
    block.catch(() => {
      if (remote.blocks.get(index) === block) remote.blocks.delete(index);
    });
    if (!remote.ranges) return;
    for (const oldest of remote.blocks.keys()) {
      if (remote.blocks.size <= KEPT_BLOCKS) break;
      remote.blocks.delete(oldest);
    }
  }

  #isDone(remote: Remote, index: number): boolean {
    return (remote.handed.get(index) ?? 0) >= Math.min(this.#blockBytes, remote.size - index * this.#blockBytes);
  }

  #handedOut(remote: Remote, index: number, bytes: number, of: number): void {
    const handed = (remote.handed.get(index) ?? 0) + bytes;
    remote.handed.set(index, handed);
    if (handed >= of) remote.blocks.delete(index);
  }

  /** One block by range. `opened` is a response whose body is that block already. */
  async #fetchBlock(remote: Remote, index: number, opened: Response | null): Promise<Uint8Array> {
    const { file, url, size } = remote;
    const start = index * this.#blockBytes;
    const out = new Uint8Array(Math.min(this.#blockBytes, size - start));
    let filled = 0;
    for (let failures = 0; filled < out.length; ) {
      const at = start + filled;
      try {
        const response = opened ?? (await this.#request(file, url, `bytes=${at}-${start + out.length - 1}`));
        opened = null;
        check(remote, response, at);
        const reader = bodyOf(remote, response).getReader();
        for (let next = await reader.read(); !next.done && filled < out.length; next = await reader.read()) {
          const bytes = next.value.subarray(0, out.length - filled);
          out.set(bytes, filled);
          filled += bytes.length;
          failures = 0;
          this.#options.onBytes?.(file, bytes.length);
        }
        if (filled < out.length) throw cutShort(remote, start + filled);
        reader.cancel().catch(() => {});
      } catch (error) {
        failures += 1;
        await this.#pauseOrThrow(remote, error, failures, at);
      }
    }
    return out;
  }

  /** Waits before the next try, or gives up: at once where trying again cannot help. */
  async #pauseOrThrow(remote: Remote, error: unknown, failures: number, at: number): Promise<void> {
    const { file, url, size } = remote;
    if (this.#closed.signal.aborted) throw new ForecallError('Aborted', 'loading was stopped.', { file });
    const known = error instanceof ForecallError ? error : null;
    if (known?.status !== undefined && known.status < 500) throw known;
    if (failures > RETRIES) throw known ?? new ForecallError('Fetch', `the connection broke ${failures} times in a row while ${file} was read, at byte ${at} of ${size} (${url}). Try again.`, { file, url }, { cause: error });
    await new Promise((resolve) => setTimeout(resolve, RETRY_DELAY_MS * 2 ** failures));
  }

  /** Without ranges: lets the file pass up to block `index`, keeping what was not handed out yet. */
  async #passTo(remote: Remote, index: number): Promise<Uint8Array> {
    for (let failures = 0; ; ) {
      if (remote.stream && remote.stream.next > index) {
        remote.stream.cancel();
        remote.stream = null;
      }
      try {
        remote.stream ??= await this.#reopen(remote);
        while (remote.stream.next < index) {
          const passing = remote.stream.next;
          const bytes = await remote.stream.take();
          if (!this.#isDone(remote, passing)) remote.blocks.set(passing, Promise.resolve(bytes));
          failures = 0;
        }
        return await remote.stream.take();
      } catch (error) {
        failures += 1;
        const at = (remote.stream?.next ?? 0) * this.#blockBytes;
        remote.stream = null;
        await this.#pauseOrThrow(remote, error, failures, at);
      }
    }
  }

  async #reopen(remote: Remote): Promise<Stream> {
    const response = await this.#request(remote.file, remote.url, null);
    check(remote, response, 0);
    return this.#streamOf(remote, response);
  }

  #streamOf(remote: Remote, response: Response): Stream {
    const reader = bodyOf(remote, response).getReader();
    let rest = new Uint8Array();
    const stream: Stream = {
      next: 0,
      take: async () => {
        const start = stream.next * this.#blockBytes;
        const out = new Uint8Array(Math.min(this.#blockBytes, remote.size - start));
        for (let filled = 0; filled < out.length; ) {
          if (rest.length === 0) {
            const next = await reader.read();
            if (next.done) throw cutShort(remote, start + filled);
            rest = next.value;
            this.#options.onBytes?.(remote.file, rest.length);
          }
          const bytes = rest.subarray(0, out.length - filled);
          out.set(bytes, filled);
          filled += bytes.length;
          rest = rest.subarray(bytes.length);
        }
        stream.next += 1;
        return out;
      },
      cancel: () => {
        reader.cancel().catch(() => {});
      },
    };
    return stream;
  }
}

/** Refuses an answer that is not the file that was opened, or not the range that was asked for. */
function check({ file, url, etag, ranges }: Remote, response: Response, at: number): void {
  const fail = (what: string): never => {
    response.body?.cancel().catch(() => {});
    throw new ForecallError('Fetch', `${file} ${what} (${url}). Load the model again.`, { file, url, status: response.status });
  };
  if (response.status === 416) fail('became shorter while it was read');
  if (response.headers.get('etag') !== etag) fail('changed on the server while it was read');
  if (!ranges) return;
  if (response.status !== 206) fail('was given by ranges first and then as a whole');
  const came = /^bytes (\d+)-/.exec(response.headers.get('content-range') ?? '')?.[1];
  if (came !== undefined && Number(came) !== at) fail(`was asked for from byte ${at} and came from byte ${came}: the server's ranges are broken`);
}

function bodyOf({ file, url }: Remote, response: Response): ReadableStream<Uint8Array<ArrayBuffer>> {
  if (!response.body) throw new ForecallError('Fetch', `${file}: the server's answer is empty (${url}).`, { file, url, status: response.status });
  return response.body;
}

function cutShort({ file, url, size }: Remote, at: number): ForecallError {
  return new ForecallError('Fetch', `${file} ended after ${at} of its ${size} bytes: the connection broke, or the server holds less than it says (${url}). Try again.`, { file, url });
}

/** One request, with its refusals as errors. The answer is 200, 206 or 416. */
async function request(file: string, url: string, headers: Record<string, string>, method: string, signal: AbortSignal | null): Promise<Response> {
  let response: Response;
  try {
    // No referrer: some hubs refuse those of pages they do not know.
    response = await fetch(url, { method, headers, signal, referrerPolicy: 'no-referrer' });
  } catch (cause) {
    throw new ForecallError('Fetch', `${file} cannot be reached at ${url}: no answer, or the server does not allow this page (CORS). Check the address and the connection.`, { file, url }, { cause });
  }
  const { status } = response;
  if (status === 416) {
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

/** A file's size by a request without a body; `null` where the server does not say. Rejects with `missing` where there is no file. */
export async function sizeWithoutBody(base: string, file: string, headers: Record<string, string>): Promise<number | null> {
  const response = await request(file, new URL(file, base).href, headers, 'HEAD', null);
  const length = response.headers.get('content-encoding') ? null : response.headers.get('content-length');
  return length === null ? null : Number(length);
}
