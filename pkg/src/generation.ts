/// <reference lib="esnext.disposable" preserve="true" />
// One running generation as its reader sees it.

import { ForecallError } from './errors.js';
import type { GenerateResult, Part } from './types.js';

/** What feeds a {@link Generation}. */
export interface GenerationSink {
  part(part: Part): void;
  finish(result: GenerateResult): void;
  fail(error: ForecallError): void;
}

/**
 * A generation under way: a `ReadableStream` of parts that `for await` also reads in every browser, and `result`.
 * Leaving the loop or cancelling the stream stops the generation; its result then says `aborted`. Reading the parts is
 * optional, and so is `result`.
 */
export class Generation extends ReadableStream<Part> {
  /** Resolves when the last token is out. Rejects with a {@link ForecallError}. */
  readonly result: Promise<GenerateResult>;

  /** @internal `start` gets the sink and returns how to stop. */
  constructor(start: (sink: GenerationSink) => () => void) {
    let controller!: ReadableStreamDefaultController<Part>;
    let stop = (): void => {};
    let open = true;
    super({
      start: (c) => {
        controller = c;
      },
      cancel: () => {
        open = false;
        stop();
      },
    });
    this.result = new Promise((resolve, reject) => {
      stop = start({
        part: (part) => {
          if (open) controller.enqueue(part);
        },
        finish: (result) => {
          if (open) controller.close();
          open = false;
          resolve(result);
        },
        fail: (error) => {
          if (open) controller.error(error);
          open = false;
          reject(error);
        },
      });
    });
    // A reader of the parts hears of a failure there.
    this.result.catch(() => {});
  }

  /** Safari's `ReadableStream` is not iterable by itself. */
  override async *[Symbol.asyncIterator](): AsyncGenerator<Part, undefined, undefined> {
    const reader = this.getReader();
    try {
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        yield value;
      }
    } finally {
      await reader.cancel().catch(() => {});
      reader.releaseLock();
    }
  }
}
