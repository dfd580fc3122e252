// The worker's end of the wire: turns commands into calls of the engine, one at a time.

import { httpSource, type ByteSource } from './bytes.js';
import { chooseBackend } from './device.js';
import { generateResult, modelInfo, partOf, type Engine, type EngineEvent, type EngineInfo, type EngineModel, type EngineOptions, type EnginePart, type EngineResult } from './engine.js';
import { ForecallError, toErrorData } from './errors.js';
import type { Command, Event, GenerateRequest, LoadRequest } from './messages.js';
import type { LoadProgress, ModelInfo } from './types.js';

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
  /** Id of the running generation, and whether it is to stop. */
  let running: { id: number; aborted: boolean; ended: Promise<void> } | null = null;

  const post = (event: Event): void => scope.postMessage(event);
  /** A lost device explains whatever failed after it. */
  const explain = (thrown: unknown) => (lost === null ? toErrorData(thrown) : toErrorData(new ForecallError('DeviceLost', `the GPU device was lost: ${lost || 'the browser gives no reason'}. Load the model again.`)));
  const fatal = (thrown: unknown): void => post({ type: 'fatal', error: explain(thrown) });

  // A panic in wasm traps, and its promise then never settles: the page must hear of it all the same.
  scope.addEventListener('error', ({ message }) => fatal(new ForecallError('Internal', `the engine stopped: ${message ?? 'no reason given'}. Load the model again.`)));
  scope.addEventListener('unhandledrejection', ({ reason }) => fatal(reason));

  const load = async (request: LoadRequest): Promise<void> => {
    const clock = stopwatch();
    const progress: LoadProgress = { phase: 'start', loadedBytes: 0, totalBytes: 0 };
    const tell = (change: Partial<LoadProgress>): void => post({ type: 'progress', progress: Object.assign(progress, change) });
    const webPages: string[] = [];
    let fetchError: ForecallError | null = null;
    const source = (base: string, prefix = ''): ByteSource => {
      const files = httpSource(base, {
        headers: request.headers,
        onSize: (file, bytes) => tell({ file: prefix + file, totalBytes: progress.totalBytes + bytes }),
        // A block may come twice; what is told never exceeds the whole.
        onBytes: (file, bytes) => tell({ file: prefix + file, loadedBytes: Math.min(progress.totalBytes, progress.loadedBytes + bytes) }),
        onMissing: (file, { status }) => {
          if (status === 200 || status === 206) webPages.push(prefix + file);
        },
      });
      // Errors pass through the engine as text; the original, with its fields, is kept.
      const keep = (error: unknown): never => {
        if (error instanceof ForecallError) fetchError ??= error;
        throw error;
      };
      return { size: (file) => files.size(file).catch(keep), read: (file, start, end) => files.read(file, start, end).catch(keep), close: () => files.close() };
    };
    tell({});

    const choice = await chooseBackend(request.backend, (message) => {
      lost = message;
    });
    const engine = await start(request.wasmUrl);
    engine.onPanic((message) => fatal(new ForecallError('Internal', `the engine panicked: ${message}. Please report this.`)));
    const startMs = clock();

    tell({ phase: 'download' });
    const checkpoint = source(request.source);
    const drafter = request.adapter === null || request.adapter === 'none' ? undefined : source(request.adapter, 'adapter/');
    const options: EngineOptions = {
      precision: request.precision,
      contextLength: request.contextLength,
      backend: choice.backend,
      adapter: choice.adapter,
      drafter: drafter ? 'source' : request.adapter === 'none' ? 'none' : 'auto',
    };
    let downloadMs = 0;
    try {
      model = await engine.load(JSON.stringify(options), checkpoint, drafter, (eventJson) => {
        const { phase, done, total } = JSON.parse(eventJson) as EngineEvent;
        if (phase !== 'compile') return;
        if (progress.phase !== 'compile') downloadMs = clock();
        tell({ phase, file: undefined, pipelines: { done, total } });
      });
    } catch (thrown) {
      const error = explain(thrown);
      if (error.code === 'Fetch' && fetchError) throw fetchError;
      if (webPages.length > 0) error.message += ` (For ${webPages.join(', ')} the server answered with a web page, which counts as no such file.)`;
      throw error;
    } finally {
      checkpoint.close();
      drafter?.close();
    }
    if (progress.phase !== 'compile') downloadMs = clock();
    const info: ModelInfo = modelInfo(JSON.parse(model.info()) as EngineInfo, choice.reason, { start: startMs, download: downloadMs, compile: clock() });
    tell({ phase: 'ready', file: undefined, pipelines: undefined });
    post({ type: 'loaded', info });
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

  scope.addEventListener('message', ({ data }) => {
    switch (data.type) {
      case 'load':
        load(data.request).catch((thrown: unknown) => post({ type: 'load-failed', error: explain(thrown) }));
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
