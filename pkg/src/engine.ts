// What the worker needs of the wasm module: `src/web.rs` of the crate implements it, and tests put a double in its place.
// Requests and answers cross as JSON text, in the words of the crate; this file also turns them into those of the package.

import type { Backend, GenerateResult, ModelInfo, Part, Piece, Precision, Quantize, Schedule, Warning } from './types.js';

/** Options of {@link Engine.load}, decided by the worker. */
export interface EngineOptions {
  source: EngineSource;
  /** Where the draft adapter is: `auto` looks beside the weights. Files are those of {@link EngineIo.pickedAdapter}. */
  drafter: 'auto' | 'none' | EngineSource;
  precision: Precision;
  /** What plain weights are turned into while loading; `null` leaves them as they are. */
  quantize: Quantize | null;
  contextLength: number | null;
  backend: Backend;
  /** What only the page can see of the WebGPU adapter: all false and zero where there is none. */
  adapter: WebAdapter;
  /** Whether what is loaded is kept in {@link EngineIo.store}. */
  store: boolean;
  /** For {@link Engine.preflight}: limits of the WebGPU adapter, and the room that the browser gives this site. */
  limits: Record<string, number> | null;
  quota: { usage: number; quota: number } | null;
}

/** A folder of files: at an address (absolute, ends in a slash) or in a repo of a hub; or the files that were picked. */
export type EngineSource =
  | { kind: 'remote'; location: string; revision: string | null; hubUrl: string | null; headers: Record<string, string> }
  | { kind: 'files' };

/** A WebGPU adapter, as far as wgpu does not know it on the web. */
export interface WebAdapter {
  /** Whether devices made in this worker have subgroups. */
  subgroups: boolean;
  /** Least and most; 0 where unknown. */
  subgroupSizes: [least: number, most: number];
  /** Whether it says that it is a software one. */
  software: boolean;
}

/**
 * One GET. Rejects only if no answer came: with an `AbortError` when the load was stopped, with any other error where
 * trying again may help. Headers are a JSON object; those of the answer have names in lower case.
 */
export type Get = (url: string, headersJson: string) => Promise<EngineResponse>;

/** An answer, piece by piece. */
export interface EngineResponse {
  status: number;
  headersJson: string;
  /** `undefined` after the last piece. Rejects as {@link Get} does. */
  next(): Promise<Uint8Array | undefined>;
  /** Nothing more is wanted of it. */
  cancel(): void;
}

/** Random access to the files that the user picked. */
export interface PickedFiles {
  /** Bytes in the file; `null` if there is none of that name. */
  size(file: string): Promise<number | null>;
  /** Bytes `start..end`, end not included. */
  read(file: string, start: number, end: number): Promise<Uint8Array>;
}

/**
 * Named blobs; names are `entry/blob`, and a prefix is empty, `entry/`, or a name. `put` replaces as a whole and rejects
 * with a `QuotaExceededError` where there is no room. `lock` takes a name for this load alone, until it is over.
 */
export interface BlobStore {
  get(name: string): Promise<Uint8Array | undefined>;
  put(name: string, bytes: Uint8Array): Promise<void>;
  /** JSON: `[[name, bytes], ...]`. */
  list(prefix: string): Promise<string>;
  remove(prefix: string): Promise<void>;
  lock(name: string): Promise<boolean>;
}

/** What the engine cannot do by itself. */
export interface EngineIo {
  get: Get;
  /** Rejects with an `AbortError` when the load was stopped. */
  sleep(ms: number): Promise<void>;
  picked: PickedFiles | undefined;
  pickedAdapter: PickedFiles | undefined;
  store: BlobStore | undefined;
}

/** The wasm module, initialised. Failures are objects `{ code, message, file, url, status, missing }`, all but two optional. */
export interface Engine {
  /** Loads a model. `onEvent` hears {@link EngineEvent}s as JSON, and stops loading with `false`. */
  load(optionsJson: string, io: EngineIo, onEvent: (eventJson: string) => boolean): Promise<EngineModel>;
  /** What loading would take, from configuration and headers alone: {@link EnginePreflight} as JSON. */
  preflight(optionsJson: string, io: EngineIo): Promise<string>;
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

/** How far loading is: bytes of all files in `download` and `upload`, shader pipelines in `compile`. Or a warning. */
export type EngineEvent = { phase: 'config' | 'download' | 'upload' | 'compile' | 'ready'; file: string | null; done: number; total: number } | { warning: Warning };

/** What loading would take. */
export interface EnginePreflight {
  model_type: string;
  quantization: string;
  tokenizer: boolean;
  drafter: boolean;
  /** What it would run on. */
  backend: 'webgpu' | 'cpu';
  fits: boolean;
  /** Which limit fails, what is needed and what there is. */
  reason: string | null;
  limit: string | null;
  download: { bytes: number; stored_bytes: number; files: { file: string; bytes: number }[] };
  memory: { weights: number; kv_cache: number; working: number; largest_binding: { bytes: number; of: string } | null };
  store: { bytes_needed: number; quota_left: number | null };
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
  prefill: { calls: number; rows: number; cached: number };
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
