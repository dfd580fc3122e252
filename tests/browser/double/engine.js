// A double of the wasm module, for tests of what stands around it: façade, worker, transport, store, page. It fetches a
// checkpoint's files, without ranges or a second try, keeps a little of them, and then "generates" a fixed text, one word a
// token. The prompt decides what goes wrong (see MISHAPS), so a test needs no other channel.

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
          prefill: { calls: 1, rows: 9, cached: 0 },
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

const WEIGHTS = 'model.safetensors';
const ADAPTER = ['adapter_config.json', 'adapter_model.safetensors'];
const TEXTS = ['config.json', 'generation_config.json', 'tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja'];
/** What the double keeps of the weights. */
const KEPT = 1 << 20;

/** A source's files: `open` gives size and pieces, or null for a file that is not there. */
function filesOf(source, io, picked) {
  if (source.kind === 'files') {
    return {
      async open(file) {
        const size = await picked.size(file);
        if (size === null) return null;
        let at = 0;
        const next = () => (at < size ? picked.read(file, at, (at = Math.min(size, at + 65536))) : undefined);
        return { size, next, cancel: () => {} };
      },
    };
  }
  const folder = source.location.includes('://') ? source.location : `${source.hubUrl}/${source.location}/resolve/${source.revision ?? 'main'}/`;
  return {
    async open(file) {
      const url = new URL(file, folder).href;
      let response;
      try {
        response = await io.get(url, JSON.stringify(source.headers));
      } catch (error) {
        if (error.name === 'AbortError') return fail('Aborted', 'loading was stopped');
        return Promise.reject({ code: 'Fetch', message: `${file} cannot be reached at ${url}: ${error.message}`, file, url });
      }
      const headers = JSON.parse(response.headersJson);
      if (response.status === 404 || headers['content-type']?.startsWith('text/html')) {
        response.cancel();
        return null;
      }
      if (response.status !== 200) return Promise.reject({ code: 'Fetch', message: `${file}: the server answered ${response.status}`, file, url, status: response.status });
      return { size: Number(headers['content-length']), next: () => response.next(), cancel: () => response.cancel() };
    },
  };
}

/** All bytes of a small file. */
async function whole({ next }) {
  const pieces = [];
  for (let piece = await next(); piece; piece = await next()) pieces.push(piece);
  return new Uint8Array(await new Blob(pieces).arrayBuffer());
}

async function must(files, file, folder) {
  return (await files.open(file)) ?? Promise.reject({ code: 'Fetch', message: `there is no ${file} at ${folder} (it may have sent a web page)`, file, missing: true });
}

/** Everything that loading needs to know beforehand. */
async function survey(options, io) {
  const files = filesOf(options.source, io, io.picked);
  const place = options.source.location ?? 'the picked files';
  const found = [];
  const config = await must(files, 'config.json', place);
  found.push({ file: 'config.json', bytes: config.size });
  let parsed;
  try {
    parsed = JSON.parse(new TextDecoder().decode(await whole(config)));
  } catch (error) {
    return fail('BadConfig', `config.json is no JSON: ${error.message}`);
  }
  const look = async (from, file, prefix = '') => {
    const opened = await from.open(file);
    opened?.cancel();
    if (opened) found.push({ file: prefix + file, bytes: opened.size });
    return opened !== null;
  };
  for (const file of TEXTS.slice(1)) await look(files, file);
  const weights = await must(files, WEIGHTS, place);
  weights.cancel();
  found.push({ file: WEIGHTS, bytes: weights.size });
  const elsewhere = typeof options.drafter === 'object';
  const drafts = elsewhere ? filesOf(options.drafter, io, io.pickedAdapter) : files;
  const folder = elsewhere ? '' : 'draft_adapter/';
  const drafter = options.drafter !== 'none' && (await look(drafts, folder + ADAPTER[0])) && (await look(drafts, folder + ADAPTER[1]));
  return { files, found, config: parsed, drafter, size: weights.size };
}

const entryOf = ({ location = '' }) => `double-${location.replace(/[^\w.-]+/g, '_')}`;
async function isStored(options, io) {
  const manifest = options.source.kind === 'remote' && (await io.store?.get(`${entryOf(options.source)}/manifest.json`));
  return Boolean(manifest && JSON.parse(new TextDecoder().decode(manifest)).complete);
}

const backendOf = ({ backend, adapter }) => (backend === 'cpu' || (backend === 'auto' && adapter.software) ? 'cpu' : 'webgpu');

/** The double as the module that `serve` starts. */
export function startDouble() {
  const state = {};
  return {
    onPanic: (hear) => {
      state.hear = hear;
    },
    async preflight(optionsJson, io) {
      const options = JSON.parse(optionsJson);
      const { found, config, drafter, size } = await survey(options, io);
      const bytes = found.reduce((sum, file) => sum + file.bytes, 0);
      const stored = (await isStored(options, io)) ? bytes : 0;
      const binding = options.limits?.maxStorageBufferBindingSize;
      const fits = config.vocab_size < 1e9;
      return JSON.stringify({
        model_type: config.model_type,
        quantization: options.quantize ? `${options.quantize.slice(1)}-bit, groups of 64` : 'as published',
        tokenizer: true,
        drafter,
        backend: backendOf(options),
        fits,
        reason: fits ? null : `the head takes 4 TB in one buffer, this device binds ${binding}`,
        limit: fits ? null : 'maxBufferSize',
        download: { bytes: bytes - stored, stored_bytes: stored, files: found },
        memory: { weights: size, kv_cache: 94371840, working: 9000000, largest_binding: options.backend === 'cpu' ? null : { bytes: 15925248, of: 'the head' } },
        store: { bytes_needed: size, quota_left: options.quota && options.quota.quota - options.quota.usage },
      });
    },
    async load(optionsJson, io, onEvent) {
      const options = JSON.parse(optionsJson);
      const tell = (phase, done, total, file = null) => onEvent(JSON.stringify({ phase, file, done, total })) || fail('Aborted', 'loading was stopped');
      await tell('config', 0, 0);
      const { files, found, config, drafter, size } = await survey(options, io);
      const total = found.reduce((sum, file) => sum + file.bytes, 0);
      const weights = await must(files, WEIGHTS, '');
      let done = total - size;
      let header = new Uint8Array();
      let promised = 0;
      for (let piece = await weights.next(); piece; piece = await weights.next()) {
        if (promised === 0) {
          header = new Uint8Array([...header, ...piece]);
          const length = header.length < 8 ? Infinity : Number(new DataView(header.buffer).getBigUint64(0, true));
          if (length > 0 && header.length >= 8 + length) {
            const tensors = JSON.parse(new TextDecoder().decode(header.subarray(8, 8 + length)));
            promised = 8 + length + Math.max(...Object.values(tensors).map((tensor) => tensor.data_offsets?.[1] ?? 0));
            if (promised > size) return fail('BadWeights', `${WEIGHTS} has ${size} bytes, but its header promises ${promised}: it is truncated`);
          }
        }
        // Not so fast that nobody could see a rate.
        if (done >> 22 !== (done + piece.length) >> 22) await sleep(CALL_MS);
        done = Math.min(total, done + piece.length);
        await tell('download', done, total, WEIGHTS);
        await tell('upload', done, total, WEIGHTS);
      }
      if (options.store && io.store && options.source.kind === 'remote') {
        const entry = entryOf(options.source);
        const put = (blob, bytes) => io.store.put(`${entry}/${blob}`, bytes);
        if (await io.store.lock(entry)) {
          try {
            await put('weights-0', new Uint8Array(Math.min(KEPT, size)));
            const now = Date.now();
            await put('manifest.json', new TextEncoder().encode(JSON.stringify({ version: 1, source: options.source.location, revision: 'double', role: 'model', complete: true, created: now, used: now })));
          } catch (error) {
            onEvent(JSON.stringify({ warning: { code: error.name === 'QuotaExceededError' ? 'store-quota' : 'store-failed', message: `the model is not kept: ${error.message}` } }));
            await io.store.remove(`${entry}/`);
          }
        } else onEvent(JSON.stringify({ warning: { code: 'store-busy', message: 'another tab is storing this model' } }));
      }
      for (let done = 0; done <= 12; done += 4) {
        await tell('compile', done, 12);
        await sleep(CALL_MS);
      }
      await tell('ready', 1, 1);
      const info = {
        model_type: config.model_type,
        vocab_size: config.vocab_size,
        end_ids: [0],
        matrix_formats: { '4-bit, groups of 32': 210, f16: 61 },
        kv_precision: options.precision === 'f32' ? 'f32' : 'f16',
        drafter: drafter ? { adapter: true, logit_shift: 1, default_widths: { verify: 4, draft: 7 } } : null,
        tokenizer: true,
        chat_template: true,
        default_schedule: drafter ? 'packed' : 'autoregressive',
        default_schedule_reason: drafter ? 'the model can draft' : 'the model cannot draft',
        context_length: options.contextLength ?? 4096,
        memory_bytes: { weights: size, kv_cache: 94371840 },
        backend: backendOf(options),
        backend_reason: options.backend === 'auto' ? 'the adapter says what it is' : 'asked for',
        device: backendOf(options) === 'cpu' ? null : { shader_f16: options.precision !== 'f32', subgroups: options.adapter.subgroups },
      };
      return modelOf(info, state);
    },
  };
}
