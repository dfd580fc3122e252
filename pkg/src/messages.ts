// What page and worker say to each other. One worker serves one model.

import type { ErrorData } from './errors.js';
import type { EnginePreflight } from './engine.js';
import type { PickedFile } from './files.js';
import type { Backend, GenerateResult, LoadProgress, Message, ModelInfo, Part, Precision, Quantize, Schedule, Warning } from './types.js';

/** Files that are each at an address of their own. The headers of the whole go to those at `origin` only. */
export interface Scattered {
  files: Record<string, string>;
  origin: string;
}

/** Where files are. `location` names the whole where they are scattered. */
export type SourceRequest =
  | { kind: 'remote'; location: string; revision: string | null; hubUrl: string | null; headers: Record<string, string>; scattered: Scattered | null }
  | { kind: 'files'; files: PickedFile[] };

/** `load`, or a look at what it would take, as data. */
export interface LoadRequest {
  source: SourceRequest;
  adapter: SourceRequest | 'auto' | 'none';
  precision: Precision;
  quantize: Quantize | null;
  contextLength: number | null;
  backend: Backend;
  store: boolean;
  wasmUrl: string | null;
}

/** `generate`, as data. `null` leaves the choice to the engine. */
export interface GenerateRequest {
  prompt: { text: string } | { messages: Message[] } | { tokens: number[] };
  maxTokens: number;
  schedule: Schedule | null;
  verifyWidth: number | null;
  draftWidth: number | null;
  anchors: number | null;
  blockLength: number | null;
  threshold: number | null;
  steps: number | null;
  ignoreEos: boolean;
  stop: string[];
  templateVariables: Record<string, unknown>;
  cachePrompt: boolean;
}

/** Page to worker. `port` leads to the page's own `fetch`, where it has one. */
export type Command =
  | { type: 'load'; request: LoadRequest; port: MessagePort | null }
  | { type: 'preflight'; request: LoadRequest; port: MessagePort | null }
  | { type: 'stop' }
  | { type: 'generate'; id: number; request: GenerateRequest }
  | { type: 'abort'; id: number }
  | { type: 'dispose' };

/** Worker to page. */
export type Event =
  /** The script is ours, and runs. */
  | { type: 'hello' }
  | { type: 'progress'; progress: LoadProgress }
  | { type: 'warning'; warning: Warning }
  | { type: 'loaded'; info: ModelInfo }
  | { type: 'preflight'; found: EnginePreflight }
  | { type: 'load-failed'; error: ErrorData }
  | { type: 'part'; id: number; part: Part }
  | { type: 'done'; id: number; result: GenerateResult }
  | { type: 'failed'; id: number; error: ErrorData }
  | { type: 'disposed' }
  /** The worker cannot go on: whatever is pending fails with this. */
  | { type: 'fatal'; error: ErrorData };
