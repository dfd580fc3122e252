// The worker's end of the wire: turns commands into calls of the engine, one at a time.

import { httpSource, type ByteSource } from './bytes.js';
import { chooseBackend } from './device.js';
import type { Engine, EngineModel } from './engine.js';
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

/** Where an adapter is looked for beside the weights. */
const ADAPTER_FOLDERS = ['linear_spec_lora/', 'draft_adapter/'];

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
    const source = (base: string, prefix = ''): ByteSource =>
      httpSource(base, {
        headers: request.headers,
        onSize: (file, bytes) => tell({ file: prefix + file, totalBytes: progress.totalBytes + bytes }),
        // A block may come twice; what is told never exceeds the whole.
        onBytes: (file, bytes) => tell({ file: prefix + file, loadedBytes: Math.min(progress.totalBytes, progress.loadedBytes + bytes) }),
        onMissing: (file, { status }) => {
          if (status === 200 || status === 206) webPages.push(prefix + file);
        },
      });
    tell({});

    const choice = await chooseBackend(request.backend, (message) => {
      lost = message;
    });
    const engine = await start(request.wasmUrl);
    engine.onPanic((message) => fatal(new ForecallError('Internal', `the engine panicked: ${message}. Please report this.`)));
    const startMs = clock();

    tell({ phase: 'download' });
    const checkpoint = source(request.source);
    const adapter = await findAdapter(request, checkpoint, source);
    let downloadMs = 0;
    try {
      const { backend, subgroups } = choice;
      model = await engine.load({ precision: request.precision, contextLength: request.contextLength, backend, subgroups }, checkpoint, adapter, (phase) => {
        downloadMs = clock();
        tell({ phase, file: undefined });
      });
    } catch (thrown) {
      const error = explain(thrown);
      if (webPages.length > 0) error.message += ` (For ${webPages.join(', ')} the server answered with a web page, which counts as no such file.)`;
      throw error;
    } finally {
      checkpoint.close();
      adapter?.close();
    }
    const info: ModelInfo = { ...model.info(), backendReason: choice.reason, timings: { start: startMs, download: downloadMs, compile: clock() } };
    tell({ phase: 'ready', file: undefined });
    post({ type: 'loaded', info });
  };

  const generate = async (id: number, request: GenerateRequest): Promise<void> => {
    if (!model) throw new ForecallError('Internal', 'a generation was asked for before the model was loaded.');
    if (lost !== null) throw new ForecallError('DeviceLost', '');
    const run = { id, aborted: false, ended: Promise.resolve() };
    const work = model.generate(request, (part) => post({ type: 'part', id, part }), () => run.aborted);
    run.ended = work.then(
      () => {},
      () => {},
    );
    running = run;
    try {
      const result = await work;
      running = null; // before the page hears of it, and may ask again
      post({ type: 'done', id, result: { ...result, timings: { ...result.timings, firstToken: 0, total: 0 } } });
    } finally {
      running = null;
    }
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

/** The adapter named, or the one beside the weights, or none. */
async function findAdapter(request: LoadRequest, checkpoint: ByteSource, source: (base: string, prefix?: string) => ByteSource): Promise<ByteSource | null> {
  if (request.adapter === 'none') return null;
  if (request.adapter !== null) return source(request.adapter, 'adapter/');
  for (const folder of ADAPTER_FOLDERS) {
    if ((await checkpoint.size(`${folder}adapter_config.json`)) !== null) return source(new URL(folder, request.source).href, folder);
  }
  return null;
}
