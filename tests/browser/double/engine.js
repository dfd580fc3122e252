// A double of the wasm module, for tests of what stands around it: façade, worker, byte source, page. It loads a
// checkpoint folder through the byte source as the engine does and then "generates" a fixed text, one word a token.
// The prompt decides what goes wrong (see MISHAPS), so a test needs no other channel.

const STORY =
  'The lighthouse keeper lit the lamp at dusk, as she had every evening for thirty years. Far out, past the reef, a whale answered with a slow, low note. ' +
  'She had never told anyone about the whale. 🐋 It came in autumn, when the herring turned, and stayed until the first storm. This year it stayed longer. ' +
  'On the night the lamp failed, it sang until the last boat was home.';
export const WORDS = STORY.match(/\s*\S+/g);

/** Prompt -> what the double does instead of answering well. */
export const MISHAPS = {
  'panic please': 'panics after two calls, and its promise never settles',
  'crash please': 'throws outside any promise',
  'lose the device': 'fails as an engine does whose device is gone',
  'overlong prompt': 'refuses the prompt',
};

const CALL_MS = 12;
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const fail = (code, message) => Promise.reject({ code, message });

/** How many draft tokens the n-th call accepts: fixed, so that runs agree. */
const acceptedBy = (schedule, call) => (schedule === 'autoregressive' ? 0 : [2, 0, 1, 3, 0, 1][call % 6]);

/** @param {{hear?: (message: string) => void}} state */
function modelOf(info, state) {
  let running = false;
  return {
    info: () => info,
    dispose: () => {
      state.disposed = true;
    },
    async generate(request, onPart, isAborted) {
      if (running) return fail('Internal', 'two generations at once reached the engine');
      running = true;
      try {
        const { prompt, maxTokens } = request;
        const asked = prompt.text ?? prompt.messages?.at(-1)?.content ?? '';
        if (asked === 'overlong prompt') return await fail('InvalidOption', 'the prompt has 9001 tokens, but the context holds 4096: shorten it, or load with a larger contextLength');
        if (prompt.tokens?.some((id) => id >= info.vocabSize)) return await fail('InvalidOption', `token ids must be below ${info.vocabSize}`);
        const schedule = request.schedule ?? info.defaultSchedule;
        const total = Math.min(maxTokens, WORDS.length);
        const result = { text: '', tokens: [], finishReason: 'length', calls: 0, rows: 0, tokensPerCall: 0, drafted: 0, accepted: 0, prefill: { calls: 1, rows: 9 }, timings: { prefill: CALL_MS, decode: 0 } };
        const started = performance.now();
        const emit = (count, drafted, accepted) => {
          const first = result.tokens.length;
          const ids = Array.from({ length: Math.min(count, total - first) }, (_, i) => first + i);
          const pieces = ids.map((id, i) => ({ text: WORDS[id], accepted: i < accepted }));
          const text = pieces.map((piece) => piece.text).join('');
          result.text += text;
          result.tokens.push(...ids);
          result.drafted += drafted;
          result.accepted += accepted;
          onPart({ text, pieces, tokens: ids, drafted, accepted, calls: result.calls });
        };
        await sleep(CALL_MS);
        emit(1, 0, 0);
        while (result.tokens.length < total) {
          if (isAborted()) {
            result.finishReason = 'aborted';
            break;
          }
          await sleep(CALL_MS);
          if (result.calls === 2 && asked === 'panic please') {
            state.hear?.('index out of bounds in the double');
            await new Promise(() => {});
          }
          if (result.calls === 2 && asked === 'crash please') {
            setTimeout(() => {
              throw new Error('unreachable');
            });
            await new Promise(() => {});
          }
          if (result.calls === 2 && asked === 'lose the device') return await fail('DeviceLost', 'the GPU device was lost; load the model again');
          const accepted = acceptedBy(schedule, result.calls);
          result.calls += 1;
          result.rows += schedule === 'autoregressive' ? 1 : 13;
          emit(accepted + 1, schedule === 'autoregressive' ? 0 : 4, accepted);
        }
        if (result.finishReason === 'length' && total === WORDS.length) result.finishReason = 'stop';
        result.tokensPerCall = result.calls > 0 ? (result.tokens.length - 1) / result.calls : 0;
        result.timings.decode = performance.now() - started;
        return result;
      } finally {
        running = false;
      }
    },
  };
}

/** The double as the module that `serve` starts. */
export function startDouble() {
  const state = {};
  return {
    onPanic: (hear) => {
      state.hear = hear;
    },
    async load(options, checkpoint, adapter, onPhase) {
      const sizeOf = async (file) => (await checkpoint.size(file)) ?? fail('Fetch', `${file}: no such file; expected a checkpoint folder`);
      const text = async (file) => new TextDecoder().decode(await checkpoint.read(file, 0, await sizeOf(file)));
      let config;
      try {
        config = JSON.parse(await text('config.json'));
      } catch (error) {
        return error.code ? Promise.reject(error) : fail('BadConfig', `config.json is no JSON: ${error.message}`);
      }
      const weights = 'model.safetensors';
      const size = await sizeOf(weights);
      const header = Number(new DataView((await checkpoint.read(weights, 0, 8)).buffer).getBigUint64(0, true));
      const tensors = JSON.parse(new TextDecoder().decode(await checkpoint.read(weights, 8, 8 + header)));
      const end = 8 + header + Math.max(...Object.values(tensors).map((tensor) => tensor.data_offsets?.[1] ?? 0));
      if (end > size) return fail('BadWeights', `${weights} has ${size} bytes, but its header promises ${end}: it is truncated`);
      for (let at = 8 + header; at < end; at += 65536) await checkpoint.read(weights, at, Math.min(end, at + 65536));
      if (adapter) await adapter.read('adapter_config.json', 0, await adapter.size('adapter_config.json'));
      onPhase('compile');
      await sleep(CALL_MS);
      return modelOf(
        {
          modelType: config.model_type,
          quantization: '4-bit, groups of 32',
          contextLength: options.contextLength ?? 4096,
          vocabSize: config.vocab_size,
          precision: options.precision === 'auto' ? 'f16' : options.precision,
          backend: options.backend,
          subgroups: options.subgroups,
          drafter: adapter ? 'draft adapter, rank 32' : null,
          defaultSchedule: adapter ? 'packed' : 'autoregressive',
          memory: { weights: size, cache: 94371840, other: 31457280 },
          rowInvariant: true,
        },
        state,
      );
    },
  };
}
