// What the worker needs of the wasm module: `src/web.rs` of the crate implements it, and tests put a double in its place.
// Requests and answers cross as JSON text, in the words of the crate; this file also turns them into those of the package.

import type { ByteSource } from './bytes.js';
import type { GenerateRequest } from './messages.js';
import type { GenerateResult, ModelInfo, Part, Precision, Schedule } from './types.js';

/** Options of {@link Engine.load}, decided by the worker. */
export interface EngineOptions {
  precision: Precision;
  contextLength: number | null;
  backend: 'webgpu' | 'cpu';
  /** Whether the browser's devices have subgroups; wgpu cannot see that by itself. */
  webSubgroups: boolean;
  /** Where the draft adapter is: `auto` looks beside the weights, `source` is the one handed over. */
  adapter: 'auto' | 'none' | 'source';
}

/** The wasm module, initialised. Failures are objects `{ code, message }`. */
export interface Engine {
  /** Loads a model. `onEvent` hears {@link EngineEvent}s as JSON. */
  load(optionsJson: string, checkpoint: ByteSource, adapter: ByteSource | undefined, onEvent: (eventJson: string) => void): Promise<EngineModel>;
  /** Names who hears of a panic, after which the module must not be used again. */
  onPanic(hear: (message: string) => void): void;
}

/** A model in the wasm module's hands. Calls must not overlap. */
export interface EngineModel {
  /** {@link EngineInfo} as JSON. */
  info(): string;
  /** Runs a {@link GenerateRequest}. `onPart` hears an {@link EnginePart} after every call and stops with `false`: `Aborted`. */
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
  /** Text of accepted draft tokens, then that of the token the verifying row chose. */
  text: [accepted: string, chosen: string];
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
  drafter: { adapter: boolean; default_widths: { verify: number; draft: number } | null } | null;
  tokenizer: boolean;
  chat_template: boolean;
  context_length: number;
  memory_bytes: { weights: number; kv_cache: number };
  backend: string;
  device: { shader_f16: boolean; subgroups: boolean } | null;
}

/** The package's words for a model. */
export function modelInfo(info: EngineInfo, backendReason: string, timings: ModelInfo['timings']): ModelInfo {
  return {
    modelType: info.model_type,
    matrixFormats: info.matrix_formats,
    contextLength: info.context_length,
    vocabSize: info.vocab_size,
    endIds: info.end_ids,
    tokenizer: info.tokenizer,
    chatTemplate: info.chat_template,
    drafter: info.drafter && { adapter: info.drafter.adapter, widths: info.drafter.default_widths },
    defaultSchedule: info.drafter ? 'packed' : 'autoregressive',
    backend: info.backend === 'webgpu' ? 'webgpu' : 'cpu',
    backendReason,
    shaderF16: info.device?.shader_f16 ?? false,
    subgroups: info.device?.subgroups ?? false,
    memory: { weights: info.memory_bytes.weights, cache: info.memory_bytes.kv_cache },
    timings,
    engine: info as unknown as Record<string, unknown>,
  };
}

/** Adds up the parts of a generation, which is all that is known of one that is stopped. */
export class Tally {
  readonly #started = performance.now();
  readonly #tokens: number[] = [];
  readonly #perCall: EngineResult['per_call'] = [];
  readonly #prefill = { calls: 0, rows: 0 };
  #text = '';
  #prefilled = this.#started;

  /** The package's words for a part. */
  part(part: EnginePart): Part {
    const { tokens, drafted, accepted, rows } = part;
    const text = part.text.join('');
    this.#text += text;
    this.#tokens.push(...tokens);
    if (part.prefill) {
      this.#prefill.calls += 1;
      this.#prefill.rows += rows;
      this.#prefilled = performance.now();
    } else {
      this.#perCall.push({ rows, drafted, accepted });
    }
    const pieces = part.text.map((text, i) => ({ text, accepted: i === 0 })).filter((piece) => piece.text !== '');
    return { text, pieces, tokens, drafted, accepted, rows, calls: this.#perCall.length };
  }

  /** The result of a generation that was stopped. */
  aborted(request: GenerateRequest, info: ModelInfo): EngineResult {
    const calls = this.#perCall.length;
    return {
      tokens: this.#tokens,
      text: info.tokenizer ? this.#text : null,
      finish_reason: 'aborted',
      schedule: request.schedule ?? info.defaultSchedule,
      prompt_tokens: this.#prefill.rows,
      calls,
      rows: this.#perCall.reduce((sum, call) => sum + call.rows, 0),
      prefill: this.#prefill,
      tokens_per_call: calls > 0 ? (this.#tokens.length - 1) / calls : 0,
      per_call: this.#perCall,
      timings_ms: { tokenize: 0, first_token: 0, prefill: this.#prefilled - this.#started, decode: performance.now() - this.#prefilled, total: 0 },
    };
  }
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
    timings: { tokenize, prefill, decode, firstToken: 0, total: 0 },
  };
}
