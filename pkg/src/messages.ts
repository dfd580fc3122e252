// What page and worker say to each other. One worker serves one model.

import type { ErrorData } from './errors.js';
import type { Backend, GenerateResult, LoadProgress, Message, ModelInfo, Part, Precision, Schedule } from './types.js';

/** `load`, as data. */
export interface LoadRequest {
  /** Folder of the checkpoint, ends in a slash. */
  source: string;
  /** Folder of the adapter (ends in a slash), `none`, or `null` to look beside the weights. */
  adapter: string | null;
  precision: Precision;
  contextLength: number | null;
  backend: Backend;
  headers: Record<string, string>;
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
}

/** Page to worker. */
export type Command =
  | { type: 'load'; request: LoadRequest }
  | { type: 'generate'; id: number; request: GenerateRequest }
  | { type: 'abort'; id: number }
  | { type: 'dispose' };

/** Worker to page. */
export type Event =
  | { type: 'progress'; progress: LoadProgress }
  | { type: 'loaded'; info: ModelInfo }
  | { type: 'load-failed'; error: ErrorData }
  | { type: 'part'; id: number; part: Part }
  | { type: 'done'; id: number; result: GenerateResult }
  | { type: 'failed'; id: number; error: ErrorData }
  | { type: 'disposed' }
  /** The worker cannot go on: whatever is pending fails with this. */
  | { type: 'fatal'; error: ErrorData };
