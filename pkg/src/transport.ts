// One of the two primitives that the engine's loader is given: a GET, and its answer piece by piece. What is asked for,
// how often, and what an answer is worth is decided in the engine (`src/fetch/` of the crate). The other is `store.ts`.
//
// A caller's own `fetch` is a function of the page, which a worker cannot call: then the page gets, and a message port
// carries the pieces over, each only when the engine asks for it.

import type { EngineResponse, Get } from './engine.js';
import type { Scattered } from './messages.js';
import type { FetchFunction } from './types.js';

/** Longest silence: then the connection counts as broken, and the engine asks for the rest anew. */
const SILENCE_MS = 30_000;

/** Gets by `fetching`, until `signal` stops everything: then what is pending rejects with an `AbortError`. */
export function getter(fetching: FetchFunction, signal: AbortSignal): Get {
  return async (url, headersJson) => {
    const request = new AbortController();
    const stop = (): void => request.abort(signal.reason);
    if (signal.aborted) stop();
    signal.addEventListener('abort', stop, { once: true });
    const close = (): void => signal.removeEventListener('abort', stop);
    /** A page's own `fetch` may give up with an `AbortError` of its own: that is a broken connection, and nobody's stop. */
    const meant = (error: unknown): unknown => (!signal.aborted && error instanceof Error && error.name === 'AbortError' ? new Error(error.message, { cause: error }) : error);
    try {
      const response = await lively(
        fetching(url, {
          headers: JSON.parse(headersJson) as Record<string, string>,
          signal: request.signal,
          // Some hubs refuse those of pages they do not know.
          referrerPolicy: 'no-referrer',
          // What is worth keeping goes into the store; a copy of the weights in the browser's cache would be a second one.
          cache: 'no-store',
        }),
        request,
      );
      const reader = response.body?.getReader();
      return {
        status: response.status,
        headersJson: JSON.stringify(Object.fromEntries(response.headers)),
        next: async () => {
          try {
            const piece = reader && (await lively(reader.read(), request));
            if (piece && !piece.done) return piece.value;
          } catch (error) {
            close();
            throw meant(error);
          }
          close();
          return undefined;
        },
        cancel: () => {
          close();
          request.abort();
        },
      };
    } catch (error) {
      close();
      throw meant(error);
    }
  };
}

/** `work`, unless it is silent for too long. */
async function lively<T>(work: Promise<T>, request: AbortController): Promise<T> {
  let timer: ReturnType<typeof setTimeout> | undefined;
  const silence = new Promise<never>((_, reject) => {
    timer = setTimeout(() => {
      reject(new Error(`no byte for ${SILENCE_MS / 1000} seconds`));
      request.abort();
    }, SILENCE_MS);
  });
  try {
    return await Promise.race([work, silence]);
  } finally {
    clearTimeout(timer);
  }
}

/** Gets the files of one folder each from its own address, and none that has none. The caller's headers go to `origin` only. */
export function scattered(get: Get, folder: string, { files, origin }: Scattered): Get {
  return async (url, headersJson) => {
    if (!url.startsWith(folder)) return get(url, headersJson);
    const name = decodeURIComponent(url.slice(folder.length));
    const address = Object.hasOwn(files, name) ? files[name] : undefined;
    if (address !== undefined) return get(address, new URL(address).origin === origin ? headersJson : ownHeaders(headersJson));
    return { status: 404, headersJson: '{}', next: async () => undefined, cancel: () => {} };
  };
}

/** What the engine says by itself. */
function ownHeaders(headersJson: string): string {
  const { range } = JSON.parse(headersJson) as { range?: string };
  return JSON.stringify({ range });
}

// ---- Across a message port -----------------------------------------------------------------------------------------

type Asked = { call: number; url: string; headersJson: string } | { call: number; next: number } | { cancel: number };
type Answered = { call: number; response: { id: number; status: number; headersJson: string } } | { call: number; piece: Uint8Array | undefined } | { call: number; error: { name: string; message: string } };

/** A copy, to be given away: the page may still read its own buffer. A page's own `fetch` may hand out any kind of bytes. */
function ownBytes(piece: unknown): Uint8Array<ArrayBuffer> {
  if (ArrayBuffer.isView(piece)) return new Uint8Array(new Uint8Array(piece.buffer, piece.byteOffset, piece.byteLength));
  if (piece instanceof ArrayBuffer) return new Uint8Array(piece.slice(0));
  throw new TypeError('the body that `fetch` answered with holds something that is no bytes');
}

/** The page's end: answers what {@link remoteGetter} asks, by `get`. */
export function answerGets(port: MessagePort, get: Get): void {
  const responses = new Map<number, EngineResponse>();
  let nextId = 1;
  const answer = async (asked: Exclude<Asked, { cancel: number }>): Promise<void> => {
    const { call } = asked;
    let answered: Answered;
    const transfer: Transferable[] = [];
    try {
      if ('url' in asked) {
        const response = await get(asked.url, asked.headersJson);
        const id = nextId++;
        responses.set(id, response);
        answered = { call, response: { id, status: response.status, headersJson: response.headersJson } };
      } else {
        const piece = await responses.get(asked.next)?.next();
        if (piece === undefined) responses.delete(asked.next);
        const own = piece && ownBytes(piece);
        if (own) transfer.push(own.buffer);
        answered = { call, piece: own };
      }
      port.postMessage(answered, transfer);
    } catch (thrown) {
      const { name, message } = thrown instanceof Error ? thrown : new Error(String(thrown));
      port.postMessage({ call, error: { name: String(name), message: String(message) } } satisfies Answered);
    }
  };
  port.onmessage = ({ data }: MessageEvent<Asked>) => {
    if (!('cancel' in data)) return void answer(data);
    responses.get(data.cancel)?.cancel();
    responses.delete(data.cancel);
  };
}

/** The worker's end: gets by way of the page, until `signal` stops everything. */
export function remoteGetter(port: MessagePort, signal: AbortSignal): Get {
  const waiting = new Map<number, { resolve: (answered: Answered) => void; reject: (error: unknown) => void }>();
  let nextCall = 1;
  port.onmessage = ({ data }: MessageEvent<Answered>) => {
    const pending = waiting.get(data.call);
    waiting.delete(data.call);
    if (!('error' in data)) return pending?.resolve(data);
    const error = new Error(data.error.message);
    error.name = data.error.name;
    pending?.reject(error);
  };
  signal.addEventListener('abort', () => {
    for (const { reject } of waiting.values()) reject(signal.reason);
    waiting.clear();
  });
  const ask = <T extends Answered>(asked: { url: string; headersJson: string } | { next: number }): Promise<T> => {
    if (signal.aborted) return Promise.reject(signal.reason);
    const call = nextCall++;
    return new Promise((resolve, reject) => {
      waiting.set(call, { resolve: resolve as (answered: Answered) => void, reject });
      port.postMessage({ call, ...asked });
    });
  };
  return async (url, headersJson) => {
    const { response } = await ask<Extract<Answered, { response: unknown }>>({ url, headersJson });
    return {
      status: response.status,
      headersJson: response.headersJson,
      next: async () => (await ask<Extract<Answered, { piece: unknown }>>({ next: response.id })).piece,
      cancel: () => port.postMessage({ cancel: response.id }),
    };
  };
}
