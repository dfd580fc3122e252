// What callers give and get: plain data only, shared by page and worker.

/** `auto` takes WebGPU where there is a real GPU, else the CPU, which beats a GPU in software. */
export type Backend = 'auto' | 'webgpu' | 'cpu';

/**
 * How K/V and weights that are not quantised are stored; sums are f32 always. `auto`: weights in f32 stay so, f16 and bf16
 * become f16 (values beyond 65504 are cut to that); K/V are f32 if all weights are, else f16. On adapters without
 * `shader-f16` too: there halves are kept in pairs and unpacked in the shader.
 */
export type Precision = 'auto' | 'f16' | 'f32';

/**
 * How tokens are decoded. The greedy text is the same under every schedule; they differ in model calls per token.
 *
 * - `autoregressive`: one token a call
 * - `two-call`: one call drafts, the next verifies
 * - `two-call-seed`: the same, and the draft call also yields the next exact token
 * - `packed`: every call verifies the last draft and makes the next
 * - `anchored`: the same with several drafts a call, for several outcomes of the verification
 * - `quadratic`, `quadratic-shared`: the same with a draft for every outcome
 */
export type Schedule = 'autoregressive' | 'two-call' | 'two-call-seed' | 'packed' | 'anchored' | 'quadratic' | 'quadratic-shared' | 'block-diffusion';

/** What plain weights (f32, f16, bf16) are turned into while they load: groups of 4 or 8 bits with a scale and a bias. */
export type Quantize = 'q4' | 'q8';

/** Files of a checkpoint or adapter by their name in its folder, each at an address of its own: bundlers scatter them. */
export type ScatteredFiles = Readonly<Record<string, string | URL>>;

/**
 * Where a checkpoint is:
 *
 * - a repo id of the Hugging Face hub, `owner/name` or `owner/name@revision`
 * - the address of a folder. Relative ones begin with `/`, `./` or `../`, or end with `/`
 * - the files of such a folder that the user picked (`<input type="file" webkitdirectory>` or `multiple`)
 * - or each file's own address
 */
export type ModelSource = string | URL | FileList | readonly File[] | ScatteredFiles;

/** `fetch`, or a function that does what it does. */
export type FetchFunction = (url: string, init: RequestInit) => Promise<Response>;

/** Where loading is. */
export interface LoadProgress {
  /**
   * `start`: worker and wasm module; `config`: small files, and what the weights are; `download`: bytes from the network;
   * `upload`: bytes of the checkpoint, from network, store or disk, going to where the model runs; `compile`: shaders and a
   * first check of the device; `ready`: done. Weights stream, so `download` and `upload` take turns.
   */
  phase: 'start' | 'config' | 'download' | 'upload' | 'compile' | 'ready';
  /** File at hand, relative to the checkpoint's folder. */
  file?: string | undefined;
  /** Bytes of this phase so far, of all files. */
  bytes: number;
  /** Bytes of this phase, of all files known so far; grows while files are discovered. */
  total: number;
  /** Bytes a second over the last seconds; `null` while unknown, and in phases that move none. */
  rate: number | null;
  /** While compiling: shader pipelines done, and in all. */
  pipelines?: { done: number; total: number } | undefined;
}

/** Something that did not stop loading, and that someone may want to know of. */
export interface Warning {
  /**
   * `store-quota`: the browser gives too little room, the model is not kept; `store-busy`: another tab is storing it;
   * `store-failed`: the store cannot be used; `store-offline`: the source does not answer, the stored copy is taken;
   * `quantized-already`: `quantize` was given, and the checkpoint's own quantisation stays. There may be others.
   */
  code: string;
  message: string;
}

/** Options of `load`. Unknown names are refused. */
export interface LoadOptions {
  /** Where the draft adapter is, as a {@link ModelSource}, or `none`. Left out: looked for beside the weights (`linear_spec_lora/`, `draft_adapter/`). */
  adapter?: ModelSource | undefined;
  /** Branch, tag or commit of a repo. Default `main`. */
  revision?: string | undefined;
  /** Address of a hub other than Hugging Face's: a mirror. */
  hubUrl?: string | URL | undefined;
  /** Left out: weights are stored as `precision` says. Checkpoints that are quantised already stay so, and `onWarning` hears of it. */
  quantize?: Quantize | undefined;
  /** Whether the model is kept in the browser, to be there the next time, offline too. Default true. Picked files are never kept. */
  store?: boolean | undefined;
  /** Called often while loading. */
  onProgress?: ((progress: LoadProgress) => void) | undefined;
  /** Called when something is amiss that does not stop loading. */
  onWarning?: ((warning: Warning) => void) | undefined;
  /** Stops loading. What was stored stays, and the next load goes on from there. */
  signal?: AbortSignal | undefined;
  /** Default `auto`. */
  precision?: Precision | undefined;
  /** Positions of the KV cache, allocated once. Default: the smaller of the model's own and 4096. */
  contextLength?: number | undefined;
  /** Default `auto`. */
  backend?: Backend | undefined;
  /**
   * HTTP headers for the files (`Authorization`, say). They are sent to the source's own origin only (to the adapter's, if
   * the source's files were picked): an adapter or a file elsewhere is asked for without them, which `fetch` can change.
   * Where that origin sends on to another one, as hubs do, the browser follows by itself: it drops `Authorization` on the way
   * (Chrome before 119 does not), and no other header.
   */
  headers?: HeadersInit | undefined;
  /** Used in place of the browser's `fetch` for these files, on the page. */
  fetch?: FetchFunction | undefined;
  /** Address of this package's `dist/worker.js`, where a bundler does not find it by itself. */
  workerUrl?: string | URL | undefined;
  /** Address of this package's `wasm/forecall_bg.wasm`, where a bundler does not find it by itself. */
  wasmUrl?: string | URL | undefined;
}

/**
 * One message of a chat. Roles, and fields beyond these two (`tool_calls`, `tool_call_id`, `reasoning_content`), are those
 * of the checkpoint's chat template.
 */
export interface Message {
  role: string;
  content: string;
  [field: string]: unknown;
}

/**
 * A text to continue, a chat to answer (through the checkpoint's template), or token ids taken as they are. Special tokens
 * written out in a text (`<|im_end|>`) are special tokens; in messages they are text.
 */
export type Prompt = string | readonly Message[] | { tokens: readonly number[] | Uint32Array | Int32Array | Uint16Array };

/** Options of `generate`. Unknown names are refused. */
export interface GenerateOptions {
  /** Most tokens to emit. Default 256. */
  maxTokens?: number | undefined;
  /** Default: `block-diffusion` for models trained for nothing else, `packed` where the model has a drafter, else `autoregressive`. */
  schedule?: Schedule | undefined;
  /** Most draft tokens verified in one call. */
  verifyWidth?: number | undefined;
  /** Masks in a draft block. */
  draftWidth?: number | undefined;
  /** Drafts per call of the `anchored` schedule. */
  anchors?: number | undefined;
  /** Tokens of a block of the `block-diffusion` schedule (positions of the window, for SetDLM). Default: the checkpoint's own. */
  blockLength?: number | undefined;
  /** Probability from which guesses of `block-diffusion` are taken over together; above 1 none is. Default: the checkpoint's own. */
  threshold?: number | undefined;
  /** Steps that fill a block of `block-diffusion` at most; without a threshold, in equal shares. */
  steps?: number | undefined;
  /** Treat end-of-text ids as ordinary tokens. */
  ignoreEos?: boolean | undefined;
  /** Further variables of the chat template, as plain data: `{ tools: [...], enable_thinking: false }`. Names are identifiers; those that the template is given anyway (`messages`, `add_generation_prompt`) are refused. */
  templateVariables?: Record<string, unknown> | undefined;
  /**
   * Use what the cache still holds of the prompt's beginning, as in the next turn of a chat. Default `true`. The text is the
   * same either way; measuring what a prompt costs needs `false`.
   */
  cachePrompt?: boolean | undefined;
  /** Texts that end the answer and are no part of it. A special token's whole text is met by that token, with `ignoreEos` too. */
  stop?: string | readonly string[] | undefined;
  /** Stops within the calls already submitted. */
  signal?: AbortSignal | undefined;
}

/** A stretch of text that came from one source. */
export interface Piece {
  text: string;
  /** Whether it was drafted and then accepted, as opposed to chosen by the verifying row itself. */
  accepted: boolean;
}

/** What one model call brought. Joining `text` of all parts gives the whole text; no part ends inside a character. */
export interface Part {
  /** New text; may be empty while a character is incomplete. */
  text: string;
  /** `text` cut by where it came from. */
  pieces: Piece[];
  /** Ids of the tokens committed by this call. */
  tokens: number[];
  /** Draft tokens this call verified. */
  drafted: number;
  /** How many of them were accepted. */
  accepted: number;
  /** Rows of the call, padding not counted. */
  rows: number;
  /** Decode calls so far: 0 while the prompt is read. */
  calls: number;
}

/** What a finished generation was. */
export interface GenerateResult {
  /** The whole text, without the end id. `null` if the checkpoint has no tokenizer. */
  text: string | null;
  /** All new ids, with the end id that stopped it. */
  tokens: number[];
  /** `stop`: an end id or a stop text; `length`: `maxTokens`; `context`: the cache is full; `aborted`: the reader stopped. */
  finishReason: 'stop' | 'length' | 'context' | 'aborted';
  /** Decode calls: forward passes after the prompt. */
  calls: number;
  /** Rows of these calls, padding not counted. */
  rows: number;
  /** Tokens emitted by decode calls, per decode call; what the prompt's calls yielded is not counted. */
  tokensPerCall: number;
  /** Draft tokens verified. */
  drafted: number;
  /** Draft tokens accepted. */
  accepted: number;
  /** The prompt's calls and rows, and how many of its tokens were in the cache already. */
  prefill: { calls: number; rows: number; cached: number };
  /** Tokens of the prompt. */
  promptTokens: number;
  /** The schedule that ran, and why that one. */
  schedule: Schedule;
  scheduleReason: string;
  /**
   * Milliseconds. `firstToken` and `total` are the page's clock, from the call of `generate`; the rest is the worker's:
   * encoding the prompt, prefill calls, decode calls.
   */
  timings: { tokenize: number; prefill: number; decode: number; firstToken: number; total: number };
}

/** What a loaded model is. */
export interface ModelInfo {
  /** `model_type` of config.json. */
  modelType: string;
  /** How the matrices are stored, with their number: `{ "4-bit, groups of 32": 210 }`. */
  matrixFormats: Record<string, number>;
  /** How K/V and weights that are not quantised are stored. Sums are f32 always. */
  precision: 'f16' | 'f32';
  /** Length of the KV cache in positions. */
  contextLength: number;
  /** Size of the vocabulary. */
  vocabSize: number;
  /** Ids that end a text. */
  endIds: number[];
  /** Whether texts, and messages, can be given as prompts. Where a template cannot be used, `engine.chat_template_error` says why. */
  tokenizer: boolean;
  chatTemplate: boolean;
  /** How the model drafts, with its default widths; `null` if it cannot. */
  drafter: { adapter: boolean; widths: { verify: number; draft: number } | null } | null;
  /** The schedule taken when none is named, and why. */
  defaultSchedule: Schedule;
  defaultScheduleReason: string;
  /** Where it runs. */
  backend: 'webgpu' | 'cpu';
  /** Why it runs there. */
  backendReason: string;
  /** Whether 16-bit floats, and subgroup operations, are in use on the GPU. */
  shaderF16: boolean;
  subgroups: boolean;
  /** Bytes of weights and of the KV cache. */
  memory: { weights: number; cache: number };
  /** Milliseconds of each phase of loading. */
  timings: { start: number; download: number; compile: number };
  /** All that the engine says of model and device, in its own words: what `forecall info --json` prints. */
  engine: Record<string, unknown>;
}
