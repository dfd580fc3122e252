// The package's one error class. It crosses from the worker as plain data and is made whole again on the page.

import type { GenerateResult } from './types.js';

/**
 * What went wrong, by whose business it is:
 *
 * - `Unsupported`: the browser or device cannot do what was asked (no WebGPU adapter, a limit too small, no storage)
 * - `Fetch`: bytes could not be had (missing file, refused request, short answer)
 * - `BadConfig`, `BadWeights`, `BadTokenizer`: a file of the checkpoint is malformed
 * - `OutOfMemory`: memory for weights, cache or activations could not be had
 * - `DeviceLost`: the GPU went away; load the model again
 * - `InvalidOption`: an option is unknown, out of range or contradicts another
 * - `Busy`: a generation is running already on this model, or a load writes what is to be deleted
 * - `Aborted`: the caller's signal stopped the work, or the model was disposed of
 * - `Internal`: a bug of Forecall's
 */
export type ErrorCode =
  | 'Unsupported'
  | 'Fetch'
  | 'BadConfig'
  | 'BadWeights'
  | 'BadTokenizer'
  | 'OutOfMemory'
  | 'DeviceLost'
  | 'InvalidOption'
  | 'Busy'
  | 'Aborted'
  | 'Internal';

/** Details that some errors carry. */
export interface ErrorFields {
  /** Address that was asked for (`Fetch`). */
  url?: string | undefined;
  /** File of the checkpoint, relative to its folder (`Fetch`). */
  file?: string | undefined;
  /** HTTP status that came, where an answer came at all (`Fetch`). */
  status?: number | undefined;
  /** Whether the file is not there, as opposed to unreachable (`Fetch`). */
  missing?: boolean | undefined;
  /** Name of the offending option (`InvalidOption`). */
  option?: string | undefined;
  /** What had been generated until then (`Aborted` by a signal). */
  partial?: GenerateResult | undefined;
}

/** An error as it travels between page and worker. */
export interface ErrorData extends ErrorFields {
  code: ErrorCode;
  message: string;
}

const CODES: ReadonlySet<string> = new Set<ErrorCode>([
  'Unsupported', 'Fetch', 'BadConfig', 'BadWeights', 'BadTokenizer', 'OutOfMemory', 'DeviceLost', 'InvalidOption', 'Busy', 'Aborted', 'Internal',
]);
const FIELDS = ['url', 'file', 'status', 'missing', 'option', 'partial'] as const;

/** Every failure of this package. Tell them apart by {@link ForecallError.code}, never by the message. */
export class ForecallError extends Error implements ErrorFields {
  override readonly name = 'ForecallError';
  readonly code: ErrorCode;
  declare readonly url?: string | undefined;
  declare readonly file?: string | undefined;
  declare readonly status?: number | undefined;
  declare readonly missing?: boolean | undefined;
  declare readonly option?: string | undefined;
  declare readonly partial?: GenerateResult | undefined;

  constructor(code: ErrorCode, message: string, fields: ErrorFields = {}, options?: { cause?: unknown }) {
    super(message, options);
    this.code = code;
    for (const field of FIELDS) if (fields[field] !== undefined) Object.defineProperty(this, field, { value: fields[field], enumerable: true });
  }
}

/** Any thrown value as data that `postMessage` can carry. Values that are not ours become `Internal`. */
export function toErrorData(thrown: unknown): ErrorData {
  if (typeof thrown === 'object' && thrown !== null && 'code' in thrown && typeof thrown.code === 'string' && CODES.has(thrown.code)) {
    const known = thrown as ErrorFields & { code: ErrorCode; message?: unknown };
    const data: ErrorData = { code: known.code, message: String(known.message ?? known.code) };
    for (const field of FIELDS) if (known[field] !== undefined) Object.assign(data, { [field]: known[field] });
    // The engine spells options in its own way.
    if (data.option) data.option = data.option.replace(/_(.)/g, (_, letter: string) => letter.toUpperCase());
    return data;
  }
  return { code: 'Internal', message: thrown instanceof Error ? `${thrown.name}: ${thrown.message}` : String(thrown) };
}

/** The inverse of {@link toErrorData}. */
export function fromErrorData(data: ErrorData, cause?: unknown): ForecallError {
  return new ForecallError(data.code, data.message, data, cause === undefined ? undefined : { cause });
}
