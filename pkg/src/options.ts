// Checks what callers give, before any worker is started. What depends on the model is checked by the engine.

import { ForecallError } from './errors.js';
import type { GenerateRequest, LoadRequest } from './messages.js';
import type { GenerateOptions, LoadOptions, Message, Prompt } from './types.js';

const LOAD_OPTIONS: ReadonlySet<string> = new Set<keyof LoadOptions>(['adapter', 'onProgress', 'signal', 'precision', 'contextLength', 'backend', 'headers', 'workerUrl', 'wasmUrl']);
const GENERATE_OPTIONS: ReadonlySet<string> = new Set<keyof GenerateOptions>(['maxTokens', 'schedule', 'verifyWidth', 'draftWidth', 'anchors', 'blockLength', 'threshold', 'steps', 'ignoreEos', 'stop', 'signal']);
const BACKENDS = ['auto', 'webgpu', 'cpu'] as const;
const PRECISIONS = ['auto', 'f16', 'f32'] as const;
const SCHEDULES = ['autoregressive', 'two-call', 'two-call-seed', 'packed', 'anchored', 'quadratic', 'quadratic-shared', 'block-diffusion'] as const;
const DEFAULT_MAX_TOKENS = 256;

function invalid(option: string, message: string): ForecallError {
  return new ForecallError('InvalidOption', message, { option });
}

/** An option that would be ignored is refused instead. */
function refuseUnknown(options: object, known: ReadonlySet<string>, where: string): void {
  if (typeof options !== 'object' || options === null) throw invalid('options', `the options of ${where} must be an object, got ${String(options)}.`);
  for (const name of Object.keys(options)) {
    if (!known.has(name)) throw invalid(name, `${where} has no option "${name}". It takes: ${[...known].join(', ')}.`);
  }
}

function oneOf<T extends string>(name: string, value: unknown, values: readonly T[]): T {
  if ((values as readonly unknown[]).includes(value)) return value as T;
  throw invalid(name, `\`${name}\` must be one of ${values.join(', ')}, got ${show(value)}.`);
}

function count(name: string, value: unknown): number {
  if (Number.isSafeInteger(value) && (value as number) > 0 && (value as number) <= 0xffff_ffff) return value as number;
  throw invalid(name, `\`${name}\` must be a whole number from 1 on, got ${show(value)}.`);
}

function signalOf(value: unknown): AbortSignal | undefined {
  if (value === undefined || (typeof AbortSignal !== 'undefined' && value instanceof AbortSignal)) return value;
  throw invalid('signal', `\`signal\` must be an AbortSignal, got ${show(value)}.`);
}

function show(value: unknown): string {
  return typeof value === 'string' ? `"${value}"` : String(value);
}

/** A folder's absolute URL with its slash. Relative ones are taken from the page. */
export function folderUrl(name: string, value: unknown): string {
  if (typeof value !== 'string' && !(value instanceof URL)) throw invalid(name, `${name} must be the URL of a folder, got ${show(value)}.`);
  const base = typeof document === 'undefined' ? (typeof location === 'undefined' ? undefined : location.href) : document.baseURI;
  let url: URL;
  try {
    url = new URL(value, base);
  } catch {
    throw invalid(name, `${name} is no URL: ${show(String(value))}.`);
  }
  if (!/^https?:$/.test(url.protocol)) throw invalid(name, `${name} must be an http or https URL, got ${show(url.href)}.`);
  if (!url.pathname.endsWith('/')) url.pathname += '/';
  return url.href;
}

function fileUrl(name: string, value: string | URL | undefined): string | null {
  if (value === undefined) return null;
  try {
    return new URL(value, typeof document === 'undefined' ? undefined : document.baseURI).href;
  } catch {
    throw invalid(name, `\`${name}\` is no URL: ${show(String(value))}.`);
  }
}

/** Checks the arguments of `load`. */
export function loadRequest(source: string | URL, options: LoadOptions): { request: LoadRequest; workerUrl: string | null; signal: AbortSignal | undefined } {
  refuseUnknown(options, LOAD_OPTIONS, 'load');
  const { adapter, precision, contextLength, backend, headers } = options;
  return {
    request: {
      source: folderUrl('the source', source),
      adapter: adapter === undefined ? null : adapter === 'none' ? 'none' : folderUrl('the adapter', adapter),
      precision: precision === undefined ? 'auto' : oneOf('precision', precision, PRECISIONS),
      contextLength: contextLength === undefined ? null : count('contextLength', contextLength),
      backend: backend === undefined ? 'auto' : oneOf('backend', backend, BACKENDS),
      headers: { ...headers },
      wasmUrl: fileUrl('wasmUrl', options.wasmUrl),
    },
    workerUrl: fileUrl('workerUrl', options.workerUrl),
    signal: signalOf(options.signal),
  };
}

function promptOf(prompt: Prompt): GenerateRequest['prompt'] {
  if (typeof prompt === 'string') return { text: prompt };
  if (Array.isArray(prompt)) {
    return {
      messages: prompt.map((message: Message, i) => {
        if (typeof message?.role !== 'string' || typeof message.content !== 'string') throw invalid('prompt', `message ${i} must have a \`role\` and a \`content\`, both strings.`);
        return { role: message.role, content: message.content };
      }),
    };
  }
  const tokens = (prompt as { tokens?: unknown } | null)?.tokens;
  if (!Array.isArray(tokens)) throw invalid('prompt', `the prompt must be a string, a list of messages or {tokens: number[]}, got ${show(prompt)}.`);
  tokens.forEach((id: unknown, i) => {
    if (!Number.isSafeInteger(id) || (id as number) < 0 || (id as number) > 0xffff_ffff) throw invalid('prompt', `token ${i} must be an id from 0 on, got ${show(id)}.`);
  });
  return { tokens: [...(tokens as number[])] };
}

function stopTexts(stop: GenerateOptions['stop']): string[] {
  const texts: unknown[] = stop === undefined ? [] : typeof stop === 'string' ? [stop] : Array.isArray(stop) ? [...stop] : [stop];
  return texts.map((text) => {
    if (typeof text === 'string' && text !== '') return text;
    throw invalid('stop', `\`stop\` must hold texts that are not empty, got ${show(text)}.`);
  });
}

/** Checks the arguments of `generate`. */
export function generateRequest(prompt: Prompt, options: GenerateOptions): { request: GenerateRequest; signal: AbortSignal | undefined } {
  refuseUnknown(options, GENERATE_OPTIONS, 'generate');
  const { maxTokens, schedule, verifyWidth, draftWidth, anchors, blockLength, threshold, steps, ignoreEos } = options;
  if (threshold !== undefined && !(typeof threshold === 'number' && threshold >= 0 && Number.isFinite(threshold))) throw invalid('threshold', `\`threshold\` must be a probability from 0 on, got ${show(threshold)}.`);
  if (ignoreEos !== undefined && typeof ignoreEos !== 'boolean') throw invalid('ignoreEos', `\`ignoreEos\` must be true or false, got ${show(ignoreEos)}.`);
  return {
    request: {
      prompt: promptOf(prompt),
      maxTokens: maxTokens === undefined ? DEFAULT_MAX_TOKENS : count('maxTokens', maxTokens),
      schedule: schedule === undefined ? null : oneOf('schedule', schedule, SCHEDULES),
      verifyWidth: verifyWidth === undefined ? null : count('verifyWidth', verifyWidth),
      draftWidth: draftWidth === undefined ? null : count('draftWidth', draftWidth),
      anchors: anchors === undefined ? null : count('anchors', anchors),
      blockLength: blockLength === undefined ? null : count('blockLength', blockLength),
      threshold: threshold ?? null,
      steps: steps === undefined ? null : count('steps', steps),
      ignoreEos: ignoreEos ?? false,
      stop: stopTexts(options.stop),
    },
    signal: signalOf(options.signal),
  };
}
