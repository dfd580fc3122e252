// The worker's end of the wire: turns commands into calls of the engine, one at a time.

import { chooseBackend } from './device.js';
import {
  generateResult, modelInfo, partOf, type Engine, type EngineEvent, type EngineInfo, type EngineIo, type EngineModel, type EngineOptions, type EnginePart, type EnginePreflight, type EngineResult, type EngineSource,
} from './engine.js';
import { ForecallError, toErrorData } from './errors.js';
import { pickedFiles } from './files.js';
import type { Command, Event, GenerateRequest, LoadRequest, SourceRequest } from './messages.js';
import { blobStore, Locks, openStore } from './store.js';
import { getter, remoteGetter, scattered } from './transport.js';
import type { LoadProgress, ModelInfo } from './types.js';

/** Progress is told this often, and whenever the phase changes. */
const TELL_MS = 50;
/** A rate is that of the last seconds; a shorter look says little. */
const RATE_MS = 4000;
const RATE_MIN_MS = 250;

/** What is used of a worker's global scope. */
export interface WorkerScope {
  postMessage(event: Event): void;
  addEventListener(type: 'message', listener: (event: { data: Command }) => void): void;
  addEventListener(type: 'error', listener: (event: { message?: string }) => void): void;
  addEventListener(type: 'unhandledrejection', listener: (event: { reason: unknown }) => void): void;
}

/** Answers commands with the engine that `start` brings up. */
export function serve(scope: WorkerScope, start: (wasmUrl: string | null) => Promise<Engine>): void {
  let model: EngineModel | null = null;
  let lost: string | null = null;
  /** Stops the load. */
  const stop = new AbortController();
  /** Id of the running generation, and whether it is to stop. */
  let running: { id: number; aborted: boolean; ended: Promise<void> } | null = null;

  const post = (event: Event): void => scope.postMessage(event);
  /** A lost device explains whatever failed after it. */
  const explain = (thrown: unknown) => (lost === null ? toErrorData(thrown) : toErrorData(new ForecallError('DeviceLost', `the GPU device was lost: ${lost.replace(/[.\s]+$/, '') || 'the browser gives no reason'}. Load the model again.`)));
  const fatal = (thrown: unknown): void => post({ type: 'fatal', error: explain(thrown) });

  // A panic in wasm traps, and its promise then never settles: the page must hear of it all the same.
  scope.addEventListener('error', ({ message }) => fatal(new ForecallError('Internal', `the engine stopped: ${message ?? 'no reason given'}. Load the model again.`)));
  scope.addEventListener('unhandledrejection', ({ reason }) => fatal(reason));

  /** What a load needs: the device, the engine, and what the engine cannot do by itself. */
  const prepare = async (request: LoadRequest, port: MessagePort | null, signal: AbortSignal) => {
    const choice = await chooseBackend(request.backend, (message) => {
      lost = message;
    });
    const engine = await start(request.wasmUrl);
    engine.onPanic((message) => fatal(new ForecallError('Internal', `the engine panicked: ${message}. Please report this.`)));

    let get = port ? remoteGetter(port, signal) : getter((url, init) => fetch(url, init), signal);
    const place = (source: SourceRequest): EngineSource => {
      if (source.kind === 'files') return { kind: 'files' };
      const { scattered: files, ...remote } = source;
      if (files) get = scattered(get, remote.location, files);
      return remote;
    };
    const { source, adapter } = request;
    const options: EngineOptions = {
      source: place(source),
      drafter: typeof adapter === 'string' ? adapter : place(adapter),
      precision: request.precision,
      quantize: request.quantize,
      contextLength: request.contextLength,
      backend: choice.backend,
      adapter: choice.adapter,
      store: request.store,
      limits: choice.limits,
      quota: await quota(),
    };
    const locks = new Locks();
    const store = request.store ? await openStore() : null;
    const io: EngineIo = {
      get: (url, headersJson) => get(url, headersJson),
      sleep: (ms) => sleep(ms, signal),
      picked: source.kind === 'files' ? pickedFiles(source.files) : undefined,
      pickedAdapter: typeof adapter === 'object' && adapter.kind === 'files' ? pickedFiles(adapter.files) : undefined,
      store: store ? blobStore(store, locks) : undefined,
    };
    return { choice, engine, io, options, close: () => locks.release() };
  };

  const load = async (request: LoadRequest, port: MessagePort | null, signal: AbortSignal): Promise<void> => {
    const clock = stopwatch();
    const tell = teller((progress) => post({ type: 'progress', progress }));
    tell({ phase: 'start', file: null, done: 0, total: 0 });
    const { choice, engine, io, options, close } = await prepare(request, port, signal);
    const startMs = clock();
    if (options.store && !io.store) post({ type: 'warning', warning: { code: 'store-failed', message: 'this browser keeps nothing for this page (it must be https or localhost, and not a private window), so the model will be fetched again the next time.' } });
    let downloadMs: number | null = null;
    try {
      model = await engine.load(JSON.stringify(options), io, (eventJson) => {
        const event = JSON.parse(eventJson) as EngineEvent;
        if ('warning' in event) post({ type: 'warning', warning: event.warning });
        else {
          if (event.phase === 'compile') downloadMs ??= clock();
          tell(event);
        }
        return !signal.aborted;
      });
    } finally {
      close();
    }
    downloadMs ??= clock();
    const info: ModelInfo = modelInfo(JSON.parse(model.info()) as EngineInfo, choice.reason, { start: startMs, download: downloadMs, compile: clock() });
    post({ type: 'loaded', info });
  };

  const preflight = async (request: LoadRequest, port: MessagePort | null, signal: AbortSignal): Promise<void> => {
    const { engine, io, options, close } = await prepare(request, port, signal);
    try {
      post({ type: 'preflight', found: JSON.parse(await engine.preflight(JSON.stringify(options), io)) as EnginePreflight });
    } finally {
      close();
    }
  };

  const generate = async (id: number, request: GenerateRequest): Promise<void> => {
    if (!model) throw new ForecallError('Internal', 'a generation was asked for before the model was loaded.');
    if (lost !== null) throw new ForecallError('DeviceLost', '');
    let calls = 0;
    const run = { id, aborted: false, ended: Promise.resolve() };
    const work = model.generate(JSON.stringify(request), (partJson) => {
      const part = JSON.parse(partJson) as EnginePart;
      if (!part.prefill) calls += 1;
      post({ type: 'part', id, part: partOf(part, calls) });
      return !run.aborted;
    });
    run.ended = work.then(
      () => {},
      () => {},
    );
    running = run;
    let result: EngineResult;
    try {
      result = JSON.parse(await work) as EngineResult;
    } finally {
      running = null; // before the page hears of it, and may ask again
    }
    post({ type: 'done', id, result: generateResult(result) });
  };

  const dispose = async (): Promise<void> => {
    if (running) {
      running.aborted = true;
      await running.ended;
    }
    model?.dispose();
    model = null;
  };

  scope.addEventListener('message', ({ data }: { data: Command | null }) => {
    // Others may speak to a worker too, an extension or a bundler's client say.
    switch (data?.type) {
      case 'load':
        load(data.request, data.port, stop.signal).catch((thrown: unknown) => post({ type: 'load-failed', error: explain(thrown) }));
        break;
      case 'preflight':
        preflight(data.request, data.port, stop.signal).catch((thrown: unknown) => post({ type: 'load-failed', error: explain(thrown) }));
        break;
      case 'stop':
        stop.abort();
        break;
      case 'generate':
        generate(data.id, data.request).catch((thrown: unknown) => post({ type: 'failed', id: data.id, error: explain(thrown) }));
        break;
      case 'abort':
        if (running?.id === data.id) running.aborted = true;
        break;
      case 'dispose':
        dispose().then(() => post({ type: 'disposed' }), fatal);
        break;
    }
  });

  post({ type: 'hello' });
}

/** Milliseconds since the last look. */
function stopwatch(): () => number {
  let last = performance.now();
  return () => {
    const now = performance.now();
    const passed = now - last;
    last = now;
    return passed;
  };
}

/** Waits, unless `signal` stops it. */
function sleep(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const stop = (): void => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal.removeEventListener('abort', stop);
      resolve();
    }, ms);
    if (signal.aborted) stop();
    signal.addEventListener('abort', stop, { once: true });
  });
}

/** Room that the browser gives this site; `null` where it does not say. */
async function quota(): Promise<EngineOptions['quota']> {
  const { usage, quota } = (await navigator.storage?.estimate?.().catch(() => null)) ?? {};
  return usage === undefined || quota === undefined ? null : { usage, quota };
}

/** Tells the engine's progress in the package's words, at a bearable pace, with rates. */
function teller(tell: (progress: LoadProgress) => void): (event: Exclude<EngineEvent, { warning: unknown }> | { phase: 'start'; file: null; done: number; total: number }) => void {
  let phase: LoadProgress['phase'] | null = null;
  let told = -Infinity;
  /** Times and bytes of each phase that moves bytes. */
  const points = { download: [] as [number, number][], upload: [] as [number, number][] };
  return (event) => {
    const now = performance.now();
    const moves = event.phase === 'download' || event.phase === 'upload' ? points[event.phase] : null;
    if (event.phase === phase && now - told < TELL_MS && event.done < event.total) return;
    // `download` and `upload` take turns: what was told of one a moment ago need not be told again.
    if (moves && now - (moves.at(-1)?.[0] ?? -Infinity) < TELL_MS && event.done < event.total) return;
    [phase, told] = [event.phase, now];
    let rate: number | null = null;
    if (moves) {
      moves.push([now, event.done]);
      while (moves.length > 2 && now - (moves[1] as [number, number])[0] > RATE_MS) moves.shift();
      const [[since, before]] = moves as [[number, number]];
      if (now - since >= RATE_MIN_MS) rate = (1000 * (event.done - before)) / (now - since);
    }
    const counts = event.phase === 'compile' ? { bytes: 0, total: 0, pipelines: { done: event.done, total: event.total } } : event.phase === 'ready' ? { bytes: 0, total: 0 } : { bytes: event.done, total: event.total };
    tell({ phase: event.phase, file: event.file ?? undefined, rate, ...counts });
  };
}
