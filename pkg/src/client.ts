// The page's end of the wire: one worker, its pending promises, and what becomes of them when the worker dies.

import { ForecallError, fromErrorData } from './errors.js';
import { Generation, type GenerationSink } from './generation.js';
import type { EnginePreflight } from './engine.js';
import type { Command, Event, GenerateRequest } from './messages.js';
import type { LoadCall } from './options.js';
import { answerGets, getter } from './transport.js';
import type { GenerateResult, LoadProgress, ModelInfo, Warning } from './types.js';

/** How long a worker may take to free the device before it is ended regardless. */
const DISPOSE_MS = 3000;

/** How long a worker's script may take to say that it runs. One that is a module, but not ours, never does. */
const HELLO_MS = 30_000;

/** How long a stopped load may take to note where it stopped; without that note, what it had stored still counts. */
const STOP_MS = 2000;
/**
 * Loads of this page that were stopped and are not over yet. The next load waits for them: they hold the lock of what it may
 * want to store, and are still noting how far they came.
 */
const stopping = new Set<Promise<unknown>>();

/** Who hears of a load. */
export interface LoadListeners {
  onProgress?: ((progress: LoadProgress) => void) | undefined;
  onWarning?: ((warning: Warning) => void) | undefined;
}

interface Loading {
  loaded: (info: ModelInfo) => void;
  looked: (found: EnginePreflight) => void;
  reject: (error: ForecallError) => void;
  listeners: LoadListeners;
}

interface Running {
  id: number;
  sink: GenerationSink;
  signal: AbortSignal | undefined;
  onAbort: () => void;
  started: number;
  firstToken: number | null;
}

/** A worker with a model in it. */
export class Client {
  readonly #worker: Worker;
  readonly #call: LoadCall;
  #load: Loading | null = null;
  #running: Running | null = null;
  #disposed: (() => void) | null = null;
  #disposal: Promise<void> | null = null;
  /** Why nothing more can be asked. */
  #ended: ForecallError | null = null;
  #nextId = 1;
  readonly #silence: ReturnType<typeof setTimeout>;

  constructor(call: LoadCall) {
    const { workerUrl } = call;
    this.#call = call;
    this.#worker = spawn(workerUrl);
    this.#worker.onmessage = ({ data }: MessageEvent<Event>) => this.#hear(data);
    this.#silence = setTimeout(() => this.#end(new ForecallError('Fetch', `the worker script${workerUrl === null ? '' : ` at ${workerUrl}`} did not start within ${HELLO_MS / 1000} seconds: it is slow to come, or not Forecall's. Pass the address of its worker.js as \`workerUrl\`.`)), HELLO_MS);
    // An error event without a message is a script that could not be fetched.
    this.#worker.onerror = (event) => {
      event.preventDefault();
      const unloaded = this.#load !== null && !event.message;
      this.#end(
        unloaded
          ? new ForecallError('Fetch', `the worker script could not be loaded${workerUrl === null ? '' : ` from ${workerUrl}`}. If a bundler moved it, pass its address as \`workerUrl\`.`)
          : new ForecallError('Internal', `the worker crashed: ${event.message || 'no reason given'}. Load the model again.`),
      );
    };
    this.#worker.onmessageerror = () => this.#end(new ForecallError('Internal', 'a message from the worker could not be read. Load the model again.'));
  }

  /** Loads the model. On failure or abort the worker is gone. */
  load(listeners: LoadListeners): Promise<ModelInfo> {
    return this.#start('load', listeners, (loading, resolve) => (loading.loaded = resolve));
  }

  /** What loading would take. The worker is gone afterwards. */
  async preflight(): Promise<EnginePreflight> {
    const found = await this.#start<EnginePreflight>('preflight', {}, (loading, resolve) => (loading.looked = resolve));
    this.#worker.terminate();
    return found;
  }

  #start<T>(type: 'load' | 'preflight', listeners: LoadListeners, hear: (loading: Loading, resolve: (value: T) => void) => void): Promise<T> {
    const { request, signal, fetch } = this.#call;
    const over = new AbortController();
    let port: MessagePort | null = null;
    if (fetch) {
      const { port1, port2 } = new MessageChannel();
      answerGets(port1, getter(fetch, over.signal));
      over.signal.addEventListener('abort', () => port1.close());
      port = port2;
    }
    let patience: ReturnType<typeof setTimeout> | undefined;
    const stopped = (): ForecallError => new ForecallError('Aborted', 'loading was stopped by its signal.', {}, { cause: signal?.reason });
    const onAbort = (): void => {
      this.#send({ type: 'stop' });
      // Then it is cut off with its worker: connections, wasm memory and the device go with it.
      patience = setTimeout(() => this.#end(stopped()), STOP_MS);
      if (type === 'load') stopping.add(loading);
    };
    const loading = new Promise<T>((resolve, reject) => {
      const ignore = (): void => {};
      this.#load = { loaded: ignore, looked: ignore, reject: (error) => reject(signal?.aborted ? stopped() : error), listeners };
      hear(this.#load, resolve);
    });
    void Promise.allSettled([...stopping]).then(() => this.#send({ type, request, port }, port ? [port] : []));
    if (signal?.aborted) onAbort();
    else signal?.addEventListener('abort', onAbort, { once: true });
    return loading.finally(() => {
      stopping.delete(loading);
      clearTimeout(patience);
      signal?.removeEventListener('abort', onAbort);
      over.abort();
    });
  }

  /** Starts a generation. All failures come through the {@link Generation}. */
  generate(request: GenerateRequest, signal: AbortSignal | undefined): Generation {
    return new Generation((sink) => {
      if (this.#ended) return refuse(sink, this.#ended);
      if (this.#running) return refuse(sink, new ForecallError('Busy', 'a generation is running on this model: wait for its result, or stop it first.'));
      if (signal?.aborted) return refuse(sink, new ForecallError('Aborted', 'the generation was stopped by its signal before it began.', {}, { cause: signal.reason }));
      const id = this.#nextId++;
      const stop = (): void => {
        if (this.#running?.id === id) this.#send({ type: 'abort', id });
      };
      this.#running = { id, sink, signal, onAbort: stop, started: performance.now(), firstToken: null };
      signal?.addEventListener('abort', stop, { once: true });
      this.#send({ type: 'generate', id, request });
      return stop;
    });
  }

  /** Frees the device and ends the worker. Whatever is pending fails with `Aborted`. */
  dispose(): Promise<void> {
    this.#disposal ??= this.#dispose();
    return this.#disposal;
  }

  async #dispose(): Promise<void> {
    if (this.#ended) return;
    const disposed = new Promise<void>((resolve) => {
      this.#disposed = resolve;
      setTimeout(resolve, DISPOSE_MS);
    });
    const error = new ForecallError('Aborted', 'the model was disposed of.');
    this.#ended = error;
    this.#settle(error);
    this.#send({ type: 'dispose' });
    await disposed;
    this.#worker.terminate();
  }

  #send(command: Command, transfer: Transferable[] = []): void {
    this.#worker.postMessage(command, transfer);
  }

  #hear(event: Event | null): void {
    switch (event?.type) {
      case 'hello':
        clearTimeout(this.#silence);
        break;
      case 'progress':
        this.#load?.listeners.onProgress?.(event.progress);
        break;
      case 'warning':
        this.#load?.listeners.onWarning?.(event.warning);
        break;
      case 'loaded':
        this.#loaded(event.info);
        break;
      case 'preflight':
        this.#load?.looked(event.found);
        this.#load = null;
        break;
      case 'load-failed':
      case 'fatal':
        this.#end(fromErrorData(event.error));
        break;
      case 'part':
        if (this.#running?.id !== event.id) break;
        if (event.part.tokens.length > 0) this.#running.firstToken ??= performance.now();
        this.#running.sink.part(event.part);
        break;
      case 'done':
        this.#finish(event.id, event.result);
        break;
      case 'failed':
        this.#release(event.id)?.sink.fail(fromErrorData(event.error));
        break;
      case 'disposed':
        this.#disposed?.();
        break;
    }
  }

  /** A stop that came when all was done is a stop still. */
  #loaded(info: ModelInfo): void {
    if (this.#call.signal?.aborted) return this.#end(new ForecallError('Aborted', 'loading was stopped by its signal.'));
    this.#load?.loaded(info);
    this.#load = null;
  }

  #finish(id: number, worked: GenerateResult): void {
    const running = this.#release(id);
    if (!running) return;
    const total = performance.now() - running.started;
    const result = { ...worked, timings: { ...worked.timings, firstToken: running.firstToken === null ? total : running.firstToken - running.started, total } };
    if (result.finishReason === 'aborted' && running.signal?.aborted) {
      running.sink.fail(new ForecallError('Aborted', 'the generation was stopped by its signal.', { partial: result }, { cause: running.signal.reason }));
    } else {
      running.sink.finish(result);
    }
  }

  #release(id: number): Running | null {
    const running = this.#running;
    if (running?.id !== id) return null;
    running.signal?.removeEventListener('abort', running.onAbort);
    this.#running = null;
    return running;
  }

  #settle(error: ForecallError): void {
    clearTimeout(this.#silence);
    this.#load?.reject(error);
    this.#load = null;
    if (this.#running) this.#release(this.#running.id)?.sink.fail(error);
  }

  #end(error: ForecallError): void {
    if (!this.#ended) {
      this.#ended = error;
      this.#worker.terminate();
    }
    this.#settle(error);
    this.#disposed?.();
  }
}

function refuse(sink: GenerationSink, error: ForecallError): () => void {
  sink.fail(error);
  return () => {};
}

function spawn(workerUrl: string | null): Worker {
  if (typeof Worker === 'undefined') throw new ForecallError('Unsupported', 'Forecall runs in a browser: there is no Worker here.');
  try {
    // Bundlers look for this very form.
    if (workerUrl === null) return new Worker(new URL('./worker.js', import.meta.url), { type: 'module' });
    if (new URL(workerUrl).origin === location.origin) return new Worker(workerUrl, { type: 'module' });
    // A worker of another origin is refused, but a blob of this one may import it.
    const blob = URL.createObjectURL(new Blob([`import ${JSON.stringify(workerUrl)};`], { type: 'text/javascript' }));
    const worker = new Worker(blob, { type: 'module' });
    setTimeout(() => URL.revokeObjectURL(blob), 60_000);
    return worker;
  } catch (cause) {
    throw new ForecallError('Unsupported', `the worker cannot be started: ${String(cause)}. If this package comes from another origin, or the page's CSP forbids it, serve it with the page or pass \`workerUrl\`.`, {}, { cause });
  }
}

