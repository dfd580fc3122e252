// The page's half: loads both engines into one page, each in its own worker, and runs one generation at a time.

import { load } from '/pkg/dist/index.js';
import { LoggerWithoutDebug, Wllama } from '/wllama/index.js';

const CONTEXT = 1024;
const wllamas = [];
let forecall;

/** Loads wllama once for each of `peers`, and Forecall; resolves to what they say of themselves. */
window.loadAll = async (peers, checkpoint) => {
  for (const peer of peers) wllamas.push(await loadWllama(peer));
  forecall = await load(checkpoint, { backend: 'cpu', contextLength: CONTEXT });
  if (forecall.info.backend !== 'cpu') throw new Error(`Forecall runs on ${forecall.info.backend}`);
  return {
    llamaCpp: Wllama.getLibllamaVersion(),
    isolated: crossOriginIsolated,
    defaultSchedule: forecall.info.defaultSchedule,
    defaultScheduleReason: forecall.info.defaultScheduleReason,
    widths: forecall.info.drafter?.widths ?? null,
  };
};

/** wllama takes its compat build where the browser has no JSPI (`WebAssembly.Suspending`): hidden from it while it loads. */
async function loadWllama({ gguf, compat }) {
  const response = await fetch(gguf);
  if (!response.ok) throw new Error(`${gguf}: status ${response.status}`);
  const blob = await response.blob();
  const wllama = new Wllama({ default: '/wllama/wasm/wllama.wasm' }, { suppressNativeLog: true, logger: LoggerWithoutDebug });
  wllama.setCompat({ wasm: '/wllama-compat/wllama.wasm', worker: '/wllama-compat/wllama.js' });
  const suspending = WebAssembly.Suspending;
  if (compat) delete WebAssembly.Suspending;
  try {
    await wllama.loadModel([blob], { n_threads: 1, n_gpu_layers: 0, n_ctx: CONTEXT, n_parallel: 1 });
  } finally {
    WebAssembly.Suspending = suspending;
  }
  if (wllama.isMultithread()) throw new Error('wllama took its multi-thread mode');
  return wllama;
}

/** llama.cpp's own timings. Its decode clock starts when the first token is there, as Forecall's does. */
async function runWllama({ text, maxTokens, instance }) {
  const start = performance.now();
  const answer = await wllamas[instance].createCompletion({
    prompt: text, // it takes no ids
    max_tokens: maxTokens,
    temperature: 0,
    ignore_eos: true,
    cache_prompt: false, // else the second run finds the prompt in the cache
    stream: false,
  });
  const total = performance.now() - start;
  const { timings } = answer;
  if (!timings) throw new Error('wllama gave no timings');
  if (timings.cache_n !== 0) throw new Error(`wllama took ${timings.cache_n} prompt tokens from its cache`);
  return { promptTokens: timings.prompt_n, tokens: timings.predicted_n, text: answer.choices[0].text, prefill: timings.prompt_ms, decode: timings.predicted_ms, total };
}

async function runForecall({ ids, maxTokens, options }) {
  const start = performance.now();
  const result = await forecall.generate({ tokens: ids }, { maxTokens, ignoreEos: true, cachePrompt: false, ...options }).result;
  const total = performance.now() - start;
  return {
    promptTokens: result.promptTokens,
    tokens: result.tokens.length,
    ids: result.tokens,
    text: result.text,
    schedule: result.schedule,
    calls: result.calls,
    rows: result.rows,
    prefill: result.timings.prefill,
    decode: result.timings.decode,
    total,
  };
}

window.runOne = (job) => (job.engine === 'wllama' ? runWllama(job) : runForecall(job));
