// Checks what callers give, before any worker is started. What depends on the model is checked by the engine.

import { ForecallError } from './errors.js';
import { namePicked } from './files.js';
import type { GenerateRequest, LoadRequest, Scattered, SourceRequest } from './messages.js';
import type { FetchFunction, GenerateOptions, LoadOptions, Message, ModelSource, Prompt, ScatteredFiles } from './types.js';

const LOAD_OPTIONS: ReadonlySet<string> = new Set<keyof LoadOptions>([
  'adapter', 'revision', 'hubUrl', 'quantize', 'store', 'onProgress', 'onWarning', 'signal', 'precision', 'contextLength', 'backend', 'headers', 'fetch', 'workerUrl', 'wasmUrl',
]);
const GENERATE_OPTIONS: ReadonlySet<string> = new Set<keyof GenerateOptions>(['maxTokens', 'schedule', 'verifyWidth', 'draftWidth', 'anchors', 'blockLength', 'threshold', 'steps', 'ignoreEos', 'stop', 'templateVariables', 'cachePrompt', 'signal']);
const BACKENDS = ['auto', 'webgpu', 'cpu'] as const;
const QUANTIZE = ['q4', 'q8'] as const;
const PRECISIONS = ['auto', 'f16', 'f32'] as const;
const SCHEDULES = ['autoregressive', 'two-call', 'two-call-seed', 'packed', 'anchored', 'quadratic', 'quadratic-shared', 'block-diffusion'] as const;
const DEFAULT_MAX_TOKENS = 256;
/** Deepest nesting of a message or variable, and the longest list of tokens or messages: the first is the engine's limit too. */
const MAX_DEPTH = 64;
const MAX_LENGTH = 2 ** 24;

function invalid(option: string, message: string): ForecallError {
  return new ForecallError('InvalidOption', message, { option });
}

/** What a caller's own objects throw as they are read (getters, revoked proxies, detached arrays) makes them a wrong option. */
function reading<T>(option: string, read: () => T): T {
  try {
    return read();
  } catch (thrown) {
    if (isOurs(thrown)) throw thrown;
    throw new ForecallError('InvalidOption', `${option.startsWith('the ') ? option : `the ${option}`} cannot be read: ${said(thrown)}.`, { option }, { cause: thrown });
  }
}

function isOurs(thrown: unknown): boolean {
  try {
    return thrown instanceof ForecallError;
  } catch {
    return false; // a revoked proxy
  }
}

/** What was thrown, in its own words. */
function said(thrown: unknown): string {
  try {
    return String(thrown instanceof Error ? thrown.message : thrown).replace(/\.$/, '');
  } catch {
    return 'it gives no reason';
  }
}

/** An option that would be ignored is refused instead. */
function refuseUnknown(options: object, known: ReadonlySet<string>, where: string): void {
  if (typeof options !== 'object' || options === null) throw invalid('options', `the options of ${where} must be an object, got ${show(options)}.`);
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
  // What only inherits from the class throws here already.
  if (value === undefined || (typeof AbortSignal !== 'undefined' && value instanceof AbortSignal && typeof value.aborted === 'boolean')) return value;
  throw invalid('signal', `\`signal\` must be an AbortSignal, got ${show(value)}.`);
}

function show(value: unknown): string {
  if (typeof value === 'string') return `"${value}"`;
  try {
    return String(value);
  } catch {
    return 'an object that cannot be shown'; // without a prototype, say
  }
}

/**
 * A text as every API of the web takes it: half of a surrogate pair is no character, and becomes U+FFFD. Texts that were cut
 * by their length have such halves.
 */
function wellFormed(text: string): string {
  return text.replace(/\p{Surrogate}/gu, '\ufffd');
}

/** Whether a source is an address; it is a repo id otherwise. */
const ADDRESS = /^([a-z][a-z0-9+.-]*:|\.{0,2}\/)|\/$/i;

/** As {@link sourceName}; `name` is what an error calls it. What is no address stays as it is: the engine knows repo ids. */
export function locationOf(name: string, value: string | URL): string {
  if (typeof value === 'string' && !ADDRESS.test(value)) return value;
  const url = absolute(name, value);
  if (!/^https?:$/.test(url.protocol)) throw invalid(name, `${name} must be an http or https URL, got ${show(url.href)}.`);
  // Browsers fetch no such address, and it would end up in messages and in the store.
  if (url.username || url.password) throw invalid(name, `${name} must be a URL without user name and password: give them as \`headers\`.`);
  if (!url.pathname.endsWith('/')) url.pathname += '/';
  return url.href;
}

/** The full name of a source, as `storage.list()` gives it: a repo id as it is, an address absolute and with its closing slash. */
export function sourceName(source: string | URL): string {
  return locationOf('the source', source);
}

function absolute(name: string, value: string | URL): URL {
  const base = typeof document === 'undefined' ? (typeof location === 'undefined' ? undefined : location.href) : document.baseURI;
  try {
    return new URL(value, base);
  } catch {
    throw invalid(name, `${name} is no URL: ${show(value)}.`);
  }
}

/** Where repo ids are, unless `hubUrl` says otherwise: what the engine knows too. */
const HUB_ORIGIN = 'https://huggingface.co';

/** The origin of a place; `null` for files of this device. */
function originOf(place: SourceRequest | 'auto' | 'none'): string | null {
  if (typeof place === 'string' || place.kind === 'files') return null;
  return ADDRESS.test(place.location) ? new URL(place.location).origin : new URL(place.hubUrl ?? HUB_ORIGIN).origin;
}

/**
 * Leaves the caller's headers to the origin they are meant for: that of the source, or of the adapter if the source's files
 * were picked. A token is for one server, and an adapter, or a scattered file, may be on another.
 */
function keepHeadersHome(source: SourceRequest, adapter: SourceRequest | 'auto' | 'none'): void {
  const home = originOf(source) ?? originOf(adapter);
  for (const place of [source, adapter]) {
    if (home === null || typeof place === 'string' || place.kind === 'files') continue;
    if (place.scattered) place.scattered.origin = home;
    else if (originOf(place) !== home) place.headers = {};
  }
}

/** Where files are. `landmark` is the file by which picked ones are recognised. */
function sourceOf(name: string, value: unknown, landmark: string, hub: { revision: string | null; hubUrl: string | null; headers: Record<string, string> }): SourceRequest {
  const remote = (location: string, scattered: Scattered | null): SourceRequest => ({ kind: 'remote', location, ...hub, scattered });
  if (typeof value === 'string' || value instanceof URL) return remote(locationOf(name, value), null);
  if (Array.isArray(value) || (typeof FileList !== 'undefined' && value instanceof FileList)) {
    const files: unknown[] = [...value];
    if (files.length === 0) throw invalid(name, `${name} is a list without files.`);
    for (const file of files) if (!(typeof File !== 'undefined' && file instanceof File)) throw invalid(name, `${name} must be a list of files (File), and holds ${show(file)}.`);
    return { kind: 'files', files: namePicked(files as File[], landmark) };
  }
  if (typeof value === 'object' && value !== null) {
    const files = Object.fromEntries(Object.entries(value as ScatteredFiles).map(([file, address]) => [file, absolute(`${name}, ${file}`, address).href]));
    // The weights' address names the whole: it is unlike that of any other set, and stays while they do.
    const weights = Object.entries(files).find(([file, address]) => file.endsWith('.safetensors') && /^https?:/.test(address));
    if (!weights) throw invalid(name, `${name} must hold the http or https address of a .safetensors file; it holds ${Object.keys(files).join(', ') || 'nothing'}.`);
    const { origin, pathname } = new URL(weights[1]);
    return remote(`${origin}${pathname}/`, { files, origin });
  }
  throw invalid(name, `${name} must be a repo id, the URL of a folder, or files, got ${show(value)}.`);
}

/** As a URL, `null` is a file called so, and an empty text the page itself: nobody means that. */
function refuseEmpty(name: string, value: unknown): void {
  if (value === '' || value === null || (typeof value !== 'string' && typeof value !== 'object')) throw invalid(name, `\`${name}\` must be a URL, got ${show(value)}.`);
}

function fileUrl(name: string, value: string | URL | undefined): string | null {
  if (value === undefined) return null;
  refuseEmpty(name, value);
  try {
    return new URL(value, typeof document === 'undefined' ? undefined : document.baseURI).href;
  } catch {
    throw invalid(name, `\`${name}\` is no URL: ${show(value)}.`);
  }
}

/** Header names and values as `fetch` takes them, so that a wrong one is seen here and not as a server that cannot be reached. */
function headersOf(value: unknown): Record<string, string> {
  if (value === undefined) return {};
  if (typeof value !== 'object' || value === null) throw invalid('headers', `\`headers\` must be an object of names and texts, got ${show(value)}.`);
  try {
    return Object.fromEntries(new Headers(value as HeadersInit));
  } catch (cause) {
    throw new ForecallError('InvalidOption', `\`headers\` must be an object of header names and texts: ${said(cause)}.`, { option: 'headers' }, { cause });
  }
}

function hubUrlOf(value: string | URL): string {
  refuseEmpty('hubUrl', value);
  const url = absolute('`hubUrl`', value);
  if (!/^https?:$/.test(url.protocol)) throw invalid('hubUrl', `\`hubUrl\` must be an http or https URL, got ${show(url.href)}.`);
  return url.href.replace(/\/$/, '');
}

/** What a load needs on the page. */
export interface LoadCall {
  request: LoadRequest;
  workerUrl: string | null;
  signal: AbortSignal | undefined;
  fetch: FetchFunction | undefined;
  listeners: Pick<LoadOptions, 'onProgress' | 'onWarning'>;
}

/** Checks the arguments of `load` and `availability`. */
export function loadRequest(source: ModelSource, options: LoadOptions, where: string): LoadCall {
  return reading('options', () => readLoad(source, options, where));
}

function readLoad(source: ModelSource, options: LoadOptions, where: string): LoadCall {
  refuseUnknown(options, LOAD_OPTIONS, where);
  const { adapter, revision, quantize, store, precision, contextLength, backend, headers, fetch, onProgress, onWarning, hubUrl } = options;
  if (revision !== undefined && (typeof revision !== 'string' || revision === '')) throw invalid('revision', `\`revision\` must be a branch, tag or commit, got ${show(revision)}.`);
  if (store !== undefined && typeof store !== 'boolean') throw invalid('store', `\`store\` must be true or false, got ${show(store)}.`);
  for (const [name, value] of Object.entries({ fetch, onProgress, onWarning })) {
    if (value !== undefined && typeof value !== 'function') throw invalid(name, `\`${name}\` must be a function, got ${show(value)}.`);
  }
  const hub = { revision: null, hubUrl: hubUrl === undefined ? null : hubUrlOf(hubUrl), headers: headersOf(headers) };
  const base = reading('the source', () => sourceOf('the source', source, 'config.json', hub));
  if (base.kind === 'remote') base.revision = revision ?? null;
  const drafter = adapter === undefined ? 'auto' : adapter === 'none' ? 'none' : reading('the adapter', () => sourceOf('the adapter', adapter, 'adapter_config.json', hub));
  keepHeadersHome(base, drafter);
  if (revision !== undefined && (base.kind === 'files' || ADDRESS.test(base.location))) throw invalid('revision', '`revision` is for repo ids: an address or a list of files has none.');
  return {
    request: {
      source: base,
      adapter: drafter,
      precision: precision === undefined ? 'auto' : oneOf('precision', precision, PRECISIONS),
      quantize: quantize === undefined ? null : oneOf('quantize', quantize, QUANTIZE),
      contextLength: contextLength === undefined ? null : count('contextLength', contextLength),
      backend: backend === undefined ? 'auto' : oneOf('backend', backend, BACKENDS),
      store: store ?? true,
      wasmUrl: fileUrl('wasmUrl', options.wasmUrl),
    },
    workerUrl: fileUrl('workerUrl', options.workerUrl),
    signal: signalOf(options.signal),
    fetch,
    listeners: { onProgress, onWarning },
  };
}

/** A list is copied before the engine can count it: one that no context holds is refused before that. */
function refuseLong(length: number, what: string): void {
  if (length > MAX_LENGTH) throw invalid('prompt', `the prompt has ${length} ${what}: more than ${MAX_LENGTH} are not taken.`);
}

function promptOf(prompt: Prompt): GenerateRequest['prompt'] {
  if (typeof prompt === 'string') return { text: wellFormed(prompt) };
  if (Array.isArray(prompt)) {
    refuseLong(prompt.length, 'messages');
    return {
      messages: [...(prompt as Message[])].map((message, i) => {
        if (typeof message?.role !== 'string' || typeof message.content !== 'string') throw invalid('prompt', `message ${i} must have a \`role\` and a \`content\`, both strings.`);
        return plainData(`message ${i}`, message, 'prompt') as Message;
      }),
    };
  }
  const tokens = (prompt as { tokens?: unknown } | null)?.tokens;
  const typed = ArrayBuffer.isView(tokens) && !(tokens instanceof DataView);
  if (!Array.isArray(tokens) && !typed) {
    const got = tokens === undefined ? show(prompt) : `{tokens: ${show(tokens)}}`;
    throw invalid('prompt', `the prompt must be a string, a list of messages or {tokens}, a list or typed array of ids, got ${got}.`);
  }
  refuseLong((tokens as { length: number }).length, 'tokens');
  const ids: unknown[] = [...(tokens as Iterable<unknown>)]; // a copy without holes
  ids.forEach((id, i) => {
    if (!Number.isSafeInteger(id) || (id as number) < 0 || (id as number) > 0xffff_ffff) throw invalid('prompt', `token ${i} must be an id from 0 on, got ${show(id)}.`);
  });
  return { tokens: ids as number[] };
}

function stopTexts(stop: GenerateOptions['stop']): string[] {
  const texts: unknown[] = stop === undefined ? [] : typeof stop === 'string' ? [stop] : Array.isArray(stop) ? [...stop] : [stop];
  return texts.map((text) => {
    if (typeof text === 'string' && text !== '' && text === wellFormed(text)) return text;
    if (typeof text === 'string' && text !== '') throw invalid('stop', '`stop` must hold texts that can be generated; one has half of a surrogate pair.');
    throw invalid('stop', `\`stop\` must hold texts that are not empty, got ${show(text)}.`);
  });
}

/** A copy of what goes to the chat template: only what JSON holds gets there. */
function plainData(name: string, value: object, option: string): unknown {
  const copy = (held: unknown, depth: number): unknown => {
    if (typeof held === 'string') return wellFormed(held);
    if (typeof held !== 'object' || held === null) return held;
    if (depth === MAX_DEPTH) throw new RangeError(`it is nested more than ${MAX_DEPTH} levels deep`);
    if (Array.isArray(held)) return held.map((item) => copy(item, depth + 1));
    return Object.fromEntries(Object.entries(held).map(([key, item]) => [wellFormed(key), copy(item, depth + 1)]));
  };
  try {
    return copy(JSON.parse(JSON.stringify(value)), 0);
  } catch (cause) {
    throw new ForecallError('InvalidOption', `${name} must be plain data, as JSON has it: ${said(cause)}.`, { option }, { cause });
  }
}

/** What every template is given by others. */
const OWN_VARIABLES = ['messages', 'add_generation_prompt'];

function variablesOf(value: unknown, chat: boolean): Record<string, unknown> {
  if (value === undefined) return {};
  const plain = typeof value === 'object' && value !== null ? plainData('`templateVariables`', value, 'templateVariables') : null;
  if (typeof plain !== 'object' || plain === null || Array.isArray(plain)) throw invalid('templateVariables', `\`templateVariables\` must be an object, got ${show(value)}.`);
  if (!chat) throw invalid('templateVariables', '`templateVariables` are for prompts of messages: a text or tokens go through no chat template.');
  const own = OWN_VARIABLES.find((name) => Object.hasOwn(plain, name));
  if (own !== undefined) throw invalid('templateVariables', `\`templateVariables\` must not hold \`${own}\`: it comes from the prompt.`);
  return plain as Record<string, unknown>;
}

/** Checks the arguments of `generate`. */
export function generateRequest(prompt: Prompt, options: GenerateOptions): { request: GenerateRequest; signal: AbortSignal | undefined } {
  return reading('options', () => readGenerate(prompt, options));
}

function readGenerate(prompt: Prompt, options: GenerateOptions): { request: GenerateRequest; signal: AbortSignal | undefined } {
  refuseUnknown(options, GENERATE_OPTIONS, 'generate');
  const { maxTokens, schedule, verifyWidth, draftWidth, anchors, blockLength, threshold, steps, ignoreEos } = options;
  if (threshold !== undefined && !(typeof threshold === 'number' && threshold >= 0 && Number.isFinite(threshold))) throw invalid('threshold', `\`threshold\` must be a probability from 0 on, got ${show(threshold)}.`);
  if (ignoreEos !== undefined && typeof ignoreEos !== 'boolean') throw invalid('ignoreEos', `\`ignoreEos\` must be true or false, got ${show(ignoreEos)}.`);
  const { cachePrompt } = options;
  if (cachePrompt !== undefined && typeof cachePrompt !== 'boolean') throw invalid('cachePrompt', `\`cachePrompt\` must be true or false, got ${show(cachePrompt)}.`);
  const asked = reading('prompt', () => promptOf(prompt));
  return {
    request: {
      prompt: asked,
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
      templateVariables: variablesOf(options.templateVariables, 'messages' in asked),
      cachePrompt: cachePrompt ?? true,
    },
    signal: signalOf(options.signal),
  };
}
