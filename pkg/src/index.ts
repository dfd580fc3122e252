/// <reference lib="esnext.disposable" preserve="true" />
// Forecall: language models in a web page, decoded one call ahead.

import { Client } from './client.js';
import { ForecallError } from './errors.js';
import { Generation } from './generation.js';
import { generateRequest, loadRequest } from './options.js';
import type { GenerateOptions, LoadOptions, ModelInfo, ModelSource, Prompt } from './types.js';

export { availability, type Availability, type AvailabilityOptions } from './availability.js';
export type { DeviceInfo } from './device.js';
export { ForecallError, type ErrorCode, type ErrorFields } from './errors.js';
export { Generation } from './generation.js';
export { sourceName } from './options.js';
export { storage, type StoredModel } from './storage.js';
export type * from './types.js';

/** A loaded model, in a worker of its own. */
export class Model {
  readonly #client: Client;
  /** What was loaded, and how it runs. */
  readonly info: ModelInfo;

  /** @internal */
  constructor(client: Client, info: ModelInfo) {
    this.#client = client;
    this.info = info;
  }

  /**
   * Generates. Returns at once; failures, `InvalidOption` and `Busy` among them, come through the {@link Generation}.
   * One generation runs at a time.
   */
  generate(prompt: Prompt, options: GenerateOptions = {}): Generation {
    try {
      const { request, signal } = generateRequest(prompt, options);
      return this.#client.generate(request, signal);
    } catch (error) {
      if (!(error instanceof ForecallError)) throw error;
      return new Generation((sink) => {
        sink.fail(error);
        return () => {};
      });
    }
  }

  /** Frees the GPU's memory and ends the worker. May be called more than once. */
  dispose(): Promise<void> {
    return this.#client.dispose();
  }

  /** `await using model = await load(...)`. */
  declare [Symbol.asyncDispose]: () => Promise<void>;
}

// Engines without explicit resource management have no such symbol.
if (typeof Symbol.asyncDispose === 'symbol') {
  Object.defineProperty(Model.prototype, Symbol.asyncDispose, { configurable: true, writable: true, value: Model.prototype.dispose });
}

/**
 * Loads a checkpoint: config.json, tokenizer.json, weights in safetensors, perhaps a draft adapter. What came over the
 * network is kept in the browser, so the next load needs no network, and one that was interrupted goes on where it stopped.
 * Rejects with a {@link ForecallError}.
 */
export async function load(source: ModelSource, options: LoadOptions = {}): Promise<Model> {
  const call = loadRequest(source, options, 'load');
  if (call.signal?.aborted) throw new ForecallError('Aborted', 'loading was stopped by its signal before it began.', {}, { cause: call.signal.reason });
  const client = new Client(call);
  return new Model(client, await client.load(call.listeners));
}
