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

function modelOf(info, state) {
  let running = false;
  return {
    info: () => JSON.stringify(info),
    dispose: () => {
      state.disposed = true;
    },
    async generate(requestJson, onPart) {
      if (running) return fail('Internal', 'two generations at once reached the engine');
      running = true;
      try {
        const request = JSON.parse(requestJson);
        const { prompt, maxTokens } = request;
        const asked = prompt.text ?? prompt.messages?.at(-1)?.content ?? '';
        if (asked === 'overlong prompt') return await fail('InvalidOption', 'the prompt has 9001 tokens, but the context holds 4096: shorten it, or load with a larger contextLength');
        if (prompt.tokens?.some((id) => id >= info.vocab_size)) return await fail('InvalidOption', `token ids must be below ${info.vocab_size}`);
        const schedule = request.schedule ?? info.default_schedule;
        const rows = schedule === 'autoregressive' ? 1 : 13;
        const total = Math.min(maxTokens, WORDS.length);
        const tokens = [];
        const perCall = [];
        const started = performance.now();
        const emit = (count, drafted, accepted, prefill) => {
          const first = tokens.length;
          const ids = Array.from({ length: Math.min(count, total - first) }, (_, i) => first + i);
          const words = ids.map((id) => WORDS[id]);
          tokens.push(...ids);
          if (!prefill) perCall.push({ rows, drafted, accepted });
          return onPart(JSON.stringify({ pieces: words.map((text, i) => ({ text, accepted: i < accepted })), tokens: ids, drafted, accepted, rows: prefill ? 9 : rows, prefill }));
        };
        await sleep(CALL_MS);
        let goOn = emit(1, 0, 0, true);
        const prefilled = performance.now();
        while (tokens.length < total) {
          if (!goOn) break;
          await sleep(CALL_MS);
          const call = perCall.length;
          if (call === 2 && asked === 'panic please') {
            state.hear?.('index out of bounds in the double');
            await new Promise(() => {});
          }
          if (call === 2 && asked === 'crash please') {
            setTimeout(() => {
              throw new Error('unreachable');
            });
            await new Promise(() => {});
          }
          if (call === 2 && asked === 'lose the device') return await fail('DeviceLost', 'the GPU device was lost; load the model again');
          const accepted = acceptedBy(schedule, call);
          goOn = emit(accepted + 1, schedule === 'autoregressive' ? 0 : 4, accepted, false);
        }
        const calls = perCall.length;
        return JSON.stringify({
          tokens,
          text: tokens.map((id) => WORDS[id]).join(''),
          finish_reason: tokens.length < total ? 'aborted' : total === WORDS.length ? 'stop' : 'length',
          schedule,
          schedule_reason: 'asked for',
          prompt_tokens: 9,
          calls,
          rows: calls * rows,
          prefill: { calls: 1, rows: 9 },
          tokens_per_call: calls > 0 ? (tokens.length - 1) / calls : 0,
          per_call: perCall,
          timings_ms: { tokenize: 0, first_token: prefilled - started, prefill: prefilled - started, decode: performance.now() - prefilled, total: performance.now() - started },
        });
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
    async load(optionsJson, checkpoint, drafter, onEvent) {
      const options = JSON.parse(optionsJson);
      const tell = (phase, done, total) => onEvent(JSON.stringify({ phase, done, total }));
      tell('config', 0, 0);
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
      const drafts = options.drafter === 'source' ? [drafter, ''] : [checkpoint, 'draft_adapter/'];
      const size2 = options.drafter === 'none' ? null : await drafts[0].size(`${drafts[1]}adapter_config.json`);
      if (size2 !== null) for (const file of ['adapter_config.json', 'adapter_model.safetensors']) await drafts[0].read(drafts[1] + file, 0, await drafts[0].size(drafts[1] + file));
      for (let done = 0; done <= 12; done += 4) {
        tell('compile', done, 12);
        await sleep(CALL_MS);
      }
      tell('ready', 1, 1);
      const info = {
        model_type: config.model_type,
        vocab_size: config.vocab_size,
        end_ids: [0],
        matrix_formats: { '4-bit, groups of 32': 210, f16: 61 },
        kv_precision: options.precision === 'f32' ? 'f32' : 'f16',
        drafter: size2 === null ? null : { adapter: true, logit_shift: 1, default_widths: { verify: 4, draft: 7 } },
        tokenizer: true,
        chat_template: true,
        default_schedule: size2 === null ? 'autoregressive' : 'packed',
        default_schedule_reason: size2 === null ? 'the model cannot draft' : 'the model can draft',
        context_length: options.contextLength ?? 4096,
        memory_bytes: { weights: size, kv_cache: 94371840 },
        backend: options.backend === 'cpu' ? 'cpu' : 'webgpu',
        backend_reason: 'asked for',
        device: options.backend === 'cpu' ? null : { shader_f16: options.precision !== 'f32', subgroups: options.adapter.subgroups },
      };
      return modelOf(info, state);
    },
  };
}
