// What the worker needs of the wasm module: `src/web.rs` of the crate implements it, and tests put a double in its place.

import type { ByteSource } from './bytes.js';
import type { GenerateRequest } from './messages.js';
import type { GenerateResult, ModelInfo, Part, Precision } from './types.js';

/** Options of {@link Engine.load}, decided by the worker. */
export interface EngineOptions {
  precision: Precision;
  contextLength: number | null;
  backend: 'webgpu' | 'cpu';
  /** Whether the browser's device was asked for subgroups; wgpu cannot see that by itself. */
  subgroups: boolean;
}

/** A model in the wasm module's hands. Calls must not overlap. Failures are objects `{code, message}`. */
export interface EngineModel {
  /** What the engine knows of it; the worker adds the rest. */
  info(): Omit<ModelInfo, 'backendReason' | 'timings'>;
  /** Runs one generation; `onPart` once per call, `isAborted` asked between calls. An aborted one resolves with what it has. */
  generate(request: GenerateRequest, onPart: (part: Part) => void, isAborted: () => boolean): Promise<EngineResult>;
  /** Frees everything, on the device too. */
  dispose(): void;
}

/** A result without what only the page can clock. */
export type EngineResult = Omit<GenerateResult, 'timings'> & { timings: { prefill: number; decode: number } };

/** The wasm module, initialised. */
export interface Engine {
  /** `adapter`: where the draft adapter's files are, or `null` for none. `onPhase` is told of `compile`. */
  load(options: EngineOptions, checkpoint: ByteSource, adapter: ByteSource | null, onPhase: (phase: 'compile') => void): Promise<EngineModel>;
  /** Hears of a panic, after which the module must not be used again. */
  onPanic(hear: (message: string) => void): void;
}
