// What the worker needs of the wasm module: `src/web.rs` of the crate implements it, and tests put a double in its place.
// Requests and answers cross as JSON text, in the words of the crate; this file also turns them into those of the package.

import type { ByteSource } from './bytes.js';
import type { Backend, GenerateResult, ModelInfo, Part, Piece, Precision, Schedule } from './types.js';

/** Options of {@link Engine.load}, decided by the worker. */
export interface EngineOptions {
  precision: Precision;
  contextLength: number | null;
  backend: Backend;
  /** What only the page can see of the WebGPU adapter: all false and zero where there is none. */
  adapter: WebAdapter;
  /** Where the draft adapter is: `auto` looks beside the weights, `source` is the one handed over. */
  drafter: 'auto' | 'none' | 'source';
}

/** A WebGPU adapter, as far as wgpu does not know it on the web. */
export interface WebAdapter {
  /** Whether devices made in this worker have subgroups. */
  subgroups: boolean;
  /** Least and most; 0 where unknown. */
  subgroupSizes: [least: number, most: number];
  /** Whether it says that it is a software one. */
  software: boolean;
}

/** The wasm module, initialised. Failures are objects `{ code, message }`. */
export interface Engine {
  /** Loads a model. `onEvent` hears {@link EngineEvent}s as JSON. */
  load(optionsJson: string, checkpoint: ByteSource, drafter: ByteSource | undefined, onEvent: (eventJson: string) => void): Promise<EngineModel>;
  /** Names who hears of a panic, after which the module must not be used again. */
  onPanic(hear: (message: string) => void): void;
}

/** A model in the wasm module's hands. Calls must not overlap. */
export interface EngineModel {
  /** {@link EngineInfo} as JSON. */
  info(): string;
  /** Runs a `GenerateRequest`. `onPart` hears an {@link EnginePart} after every call and stops it with `false`. */
  generate(requestJson: string, onPart: (partJson: string) => boolean): Promise<string>;
  /** Frees everything, on the device too. */
  dispose(): void;
}

/** How far loading is. */
export interface EngineEvent {
  phase: 'config' | 'weights' | 'compile' | 'ready';
  done: number;
  total: number;
}

/** One call. */
export interface EnginePart {
  pieces: Piece[];
  tokens: number[];
  drafted: number;
  accepted: number;
  rows: number;
  prefill: boolean;
}

/** A generation. */
export interface EngineResult {
  tokens: number[];
  text: string | null;
  finish_reason: GenerateResult['finishReason'];
  schedule: Schedule;
  schedule_reason: string;
  prompt_tokens: number;
  calls: number;
  rows: number;
  prefill: { calls: number; rows: number };
  tokens_per_call: number;
  per_call: { rows: number; drafted: number; accepted: number }[];
  timings_ms: { tokenize: number; first_token: number; prefill: number; decode: number; total: number };
}

/** A model, as far as the package names it. */
export interface EngineInfo {
  model_type: string;
  vocab_size: number;
  end_ids: number[];
  matrix_formats: Record<string, number>;
  kv_precision: 'f16' | 'f32';
  drafter: { adapter: boolean; default_widths: { verify: number; draft: number } | null } | null;
  tokenizer: boolean;
  chat_template: boolean;
  context_length: number;
  default_schedule: Schedule | null;
  default_schedule_reason: string;
  memory_bytes: { weights: number; kv_cache: number };
  backend: string;
  backend_reason: string;
  /** The GPU, or the CPU path in words. */
  device: { name: string; shader_f16?: boolean; subgroups?: boolean } | null;
}

/** The package's words for a model. */
export function modelInfo(info: EngineInfo, reason: string | null, timings: ModelInfo['timings']): ModelInfo {
  return {
    modelType: info.model_type,
    matrixFormats: info.matrix_formats,
    precision: info.kv_precision,
    contextLength: info.context_length,
    vocabSize: info.vocab_size,
    endIds: info.end_ids,
    tokenizer: info.tokenizer,
    chatTemplate: info.chat_template,
    drafter: info.drafter && { adapter: info.drafter.adapter, widths: info.drafter.default_widths },
    defaultSchedule: info.default_schedule ?? 'autoregressive',
    defaultScheduleReason: info.default_schedule_reason,
    backend: info.backend === 'webgpu' ? 'webgpu' : 'cpu',
    backendReason: reason ?? info.backend_reason,
    shaderF16: info.device?.shader_f16 ?? false,
    subgroups: info.device?.subgroups ?? false,
    memory: { weights: info.memory_bytes.weights, cache: info.memory_bytes.kv_cache },
    timings,
    engine: info as unknown as Record<string, unknown>,
  };
}

/** The package's words for a part; `calls` are the decode calls up to it. */
export function partOf({ pieces, tokens, drafted, accepted, rows }: EnginePart, calls: number): Part {
  return { text: pieces.map((piece) => piece.text).join(''), pieces, tokens, drafted, accepted, rows, calls };
}

/** The package's words for a result; the page fills in what only it can clock. */
export function generateResult(result: EngineResult): GenerateResult {
  const { tokenize, prefill, decode } = result.timings_ms;
  const sum = (key: 'drafted' | 'accepted') => result.per_call.reduce((total, call) => total + call[key], 0);
  return {
    text: result.text,
    tokens: result.tokens,
    finishReason: result.finish_reason,
    calls: result.calls,
    rows: result.rows,
    tokensPerCall: result.tokens_per_call,
    drafted: sum('drafted'),
    accepted: sum('accepted'),
    prefill: result.prefill,
    promptTokens: result.prompt_tokens,
    schedule: result.schedule,
    scheduleReason: result.schedule_reason,
    timings: { tokenize, prefill, decode, firstToken: 0, total: 0 },
  };
}
