// The demo page: what any page can do with the package, and nothing else.

import { availability, load } from './pkg/dist/index.js';
import { bytes, decimal, duration } from './format.js';
import { Panel } from './panel.js';

const DEMO_MODEL = 'models/smollm2-135m-instruct/';
const DEMO_NAME = 'SmolLM2-135M-Instruct';
/** Name, and what it does. */
const SCHEDULES = {
  packed: ['Packed', 'every call checks the last guess and makes the next'],
  'two-call': ['Two-call', 'one call guesses, the next checks'],
  'two-call-seed': ['Two-call, seeded', 'one call guesses and finds one sure token, the next checks'],
  anchored: ['Anchored', 'as packed, with guesses for two outcomes of the check'],
  autoregressive: ['Autoregressive', 'one token a call, nothing is guessed'],
};
const nameOf = (schedule) => SCHEDULES[schedule]?.[0] ?? schedule;
/** How much of the download is announced to screen readers. */
const ANNOUNCE_STEP = 0.25;
/** The first small files say nothing of the connection's speed. */
const RATE_FROM_BYTES = 200_000;

const $ = (id) => document.getElementById(id);
const query = new URLSearchParams(location.search);
const source = new URL(query.get('model') ?? DEMO_MODEL, document.baseURI);
if (!source.pathname.endsWith('/')) source.pathname += '/';
const options = {
  ...(query.has('adapter') && { adapter: query.get('adapter') === 'none' ? 'none' : new URL(query.get('adapter'), document.baseURI) }),
  ...(query.has('backend') && { backend: query.get('backend') }),
  ...(query.has('precision') && { precision: query.get('precision') }),
  ...(query.has('context') && { contextLength: Number(query.get('context')) }),
};

let found = null;
let model = null;
let loading = null;
let running = null;
const record = { page: location.origin + location.pathname, model: source.href, options: { ...options, adapter: options.adapter?.toString() }, browser: navigator.userAgent, crossOriginIsolated, runs: [], errors: [] };

const show = (element, visible) => {
  element.hidden = !visible;
};
const announce = (text) => {
  $('status').textContent = text;
};

/** A refusal as a person wants it: what happened, then what may help. */
function showError(box, error, title) {
  box.replaceChildren();
  if (error) {
    const [head, body] = [document.createElement('strong'), document.createElement('span')];
    head.textContent = title;
    body.textContent = error.message.charAt(0).toUpperCase() + error.message.slice(1);
    box.append(head, body);
    record.errors.push({ code: error.code ?? error.name, message: error.message });
    showDiagnostics();
  }
  show(box, Boolean(error));
}

function showFacts(list, facts) {
  list.replaceChildren(
    ...facts
      .filter(([, value]) => value !== null && value !== undefined && value !== '')
      .map(([name, value]) => {
        const cell = document.createElement('div');
        const [term, description] = [document.createElement('dt'), document.createElement('dd')];
        term.textContent = name;
        description.textContent = value;
        cell.append(term, description);
        return cell;
      }),
  );
  show(list, true);
}

function showDiagnostics() {
  $('diagnostics-text').textContent = JSON.stringify({ ...record, device: found?.device ?? null, files: found?.files ?? null, loaded: model?.info ?? null }, null, 2);
}

// ---- The device and the model's size -------------------------------------------------------------------------------

function showDevice({ device, backend, reason }) {
  const verdict = $('device-verdict');
  if (backend === null) {
    verdict.textContent = 'No GPU for this page';
    verdict.dataset.state = 'bad';
    showError($('device-help'), { message: device.reason, code: 'Unsupported' }, 'The model cannot run here.');
    return;
  }
  verdict.textContent = backend === 'webgpu' ? 'Runs on your GPU' : 'Runs on your CPU, slower than on a GPU';
  verdict.dataset.state = backend === 'webgpu' ? 'good' : 'fair';
  $('device-reason').textContent = backend === 'cpu' && reason ? reason : '';
  show($('device-reason'), $('device-reason').textContent !== '');
  const { adapter, limits } = device;
  const name = adapter && (adapter.description || [adapter.vendor, adapter.architecture].filter(Boolean).join(' '));
  const size = device.subgroupMinSize === device.subgroupMaxSize ? device.subgroupMinSize : `${device.subgroupMinSize} to ${device.subgroupMaxSize}`;
  showFacts($('device-facts'), [
    ['GPU adapter', adapter ? name || 'not named by the browser' : 'none'],
    ['16-bit floats', adapter && (device.shaderF16 ? 'yes' : 'no, 32-bit is used')],
    ['Subgroups', adapter && (device.subgroups ? `yes, of ${size}` : 'no')],
    ['Largest binding', limits && bytes(limits.maxStorageBufferBindingSize)],
    ['Largest buffer', limits && bytes(limits.maxBufferSize)],
    ['Main memory', device.memoryGiB && `${device.memoryGiB >= 8 ? 'at least ' : ''}${device.memoryGiB} GB`],
  ]);
}

function showSize() {
  const size = $('model-size');
  if (found.files.length === 0) {
    size.textContent = '';
    if (found.backend !== null) showError($('load-error'), { message: found.reason, code: 'Fetch' }, 'The model cannot be found.');
    return;
  }
  const from = source.origin === location.origin ? 'this server' : source.host;
  const sum = (wanted) => found.files.filter(({ file }) => wanted(file)).reduce((total, file) => total + (file.bytes ?? 0), 0);
  const weights = (file) => /(^|\/)model.*\.safetensors$/.test(file) && !adapter(file);
  const adapter = (file) => file.includes('/');
  showFacts($('file-facts'), [
    ['Weights', bytes(sum(weights))],
    ['Draft adapter', sum(adapter) ? bytes(sum(adapter)) : 'none found'],
    ['Tokenizer, config', bytes(sum((file) => !weights(file) && !adapter(file)))],
  ]);
  size.textContent = found.bytes === null ? `Its size is not told by ${from}. Nothing is downloaded yet.` : `${bytes(found.bytes)} to download from ${from}. Nothing is downloaded yet.`;
}

async function look() {
  $('model-name').textContent = source.href === new URL(DEMO_MODEL, document.baseURI).href ? DEMO_NAME : decodeURIComponent(source.pathname.split('/').at(-2) || source.host);
  // Another server hears of this page only when its user says so.
  const foreign = source.origin !== location.origin;
  found = await availability(foreign ? undefined : source, { adapter: options.adapter, backend: options.backend });
  showDevice(found);
  if (foreign) $('model-size').textContent = `From ${source.host}. Nothing is asked for or downloaded yet.`;
  else showSize();
  $('load').disabled = !(found.backend !== null && (foreign || found.files.length > 0));
  showDiagnostics();
}

// ---- Loading -------------------------------------------------------------------------------------------------------

/** Bytes a second over the last seconds. */
function speedometer() {
  const points = [];
  return (loaded) => {
    const now = performance.now();
    points.push([now, loaded]);
    while (points.length > 2 && now - points[0][0] > 4000) points.shift();
    const [[t0, b0]] = points;
    return now - t0 > 250 ? (1000 * (loaded - b0)) / (now - t0) : null;
  };
}

const PHASES = { start: 'Starting', download: 'Downloading', compile: 'Preparing the GPU', ready: 'Ready' };

function progressView() {
  const rate = speedometer();
  let announced = 0;
  let last = 0;
  return ({ phase, loadedBytes, totalBytes, pipelines }) => {
    const now = performance.now();
    const total = Math.max(totalBytes, found.bytes ?? 0);
    const done = phase === 'download' && loadedBytes >= total;
    if (phase === 'download' && !done && now - last < 80) return;
    last = now;
    $('progress-label').textContent = PHASES[phase];
    const bar = $('progress');
    if (phase === 'download' && total > 0) {
      const speed = loadedBytes > RATE_FROM_BYTES ? rate(loadedBytes) : null;
      bar.value = loadedBytes / total;
      $('progress-amount').textContent = `${bytes(loadedBytes)} of ${bytes(total)}`;
      $('progress-rate').textContent = speed ? `${bytes(speed)}/s, ${duration((1000 * (total - loadedBytes)) / speed)} left` : '';
      if (bar.value >= announced + ANNOUNCE_STEP) {
        announced = Math.floor(bar.value / ANNOUNCE_STEP) * ANNOUNCE_STEP;
        announce(`Downloading: ${Math.round(100 * announced)} percent`);
      }
    } else {
      if (pipelines?.total) bar.value = pipelines.done / pipelines.total;
      else bar.removeAttribute('value');
      $('progress-amount').textContent = pipelines?.total ? `${pipelines.done} of ${pipelines.total} shaders` : '';
      $('progress-rate').textContent = '';
    }
  };
}

async function startLoading() {
  const focused = document.activeElement === $('load');
  loading = new AbortController();
  const started = performance.now();
  showError($('load-error'), null);
  show($('load-row'), false);
  show($('loading'), true);
  $('progress').removeAttribute('value');
  if (focused) $('load-cancel').focus();
  announce('Loading the model');
  try {
    model = await load(source, { ...options, onProgress: progressView(), signal: loading.signal });
    record.loadMs = Math.round(performance.now() - started);
    showLoaded(performance.now() - started);
  } catch (error) {
    show($('load-row'), true);
    if (error.code === 'Aborted') announce('Loading was cancelled');
    else showError($('load-error'), error, 'The model could not be loaded.');
    if (focused) $('load').focus();
  } finally {
    loading = null;
    show($('loading'), false);
    showDiagnostics();
  }
}

function showLoaded(ms) {
  const { info } = model;
  const memory = info.memory.weights + info.memory.cache;
  const stored = Object.keys(info.matrixFormats);
  const quantised = stored.filter((format) => /bit/.test(format));
  $('model-size').textContent = `Ready in ${duration(ms)}. Runs on the ${info.backend === 'webgpu' ? 'GPU' : 'CPU'}: ${info.backendReason.replace(/\.$/, '')}.`;
  showFacts($('model-facts'), [
    ['Runs on', `${info.backend === 'webgpu' ? 'WebGPU' : 'the CPU'}${info.subgroups ? ', with subgroups' : ''}`],
    ['Weights', (quantised.length > 0 ? quantised : stored).join('; ')],
    ['Arithmetic', info.precision === 'f16' ? '16-bit storage, 32-bit sums' : '32-bit'],
    ['Guesses with', info.drafter ? (info.drafter.adapter ? 'a draft adapter' : 'the model itself') : 'nothing: one token a call'],
    ['Context', `${info.contextLength} tokens`],
    ['Memory on it', bytes(memory)],
  ]);
  show($('loaded'), true);
  show($('file-facts'), false);
  for (const option of $('schedule').options) option.disabled = info.drafter === null && option.value !== 'autoregressive';
  for (const option of $('compare').options) option.disabled = info.drafter === null && option.value !== '' && option.value !== 'autoregressive';
  $('schedule').value = info.defaultSchedule;
  explainSchedule();
  if ($('compare').selectedOptions[0]?.disabled) $('compare').value = '';
  setReady(true);
  announce('The model is ready');
  if (document.activeElement === document.body || document.activeElement === $('load-cancel')) $('prompt').focus({ preventScroll: true });
}

function explainSchedule() {
  const [name, meaning] = SCHEDULES[$('schedule').value];
  $('schedule-meaning').textContent = `${name}: ${meaning}. The text is the same with every schedule.`;
}

function setReady(ready) {
  $('generate').disabled = !ready;
  $('prompt-hint').textContent = ready ? '' : 'Load the model first.';
}

async function unload() {
  running?.abort();
  const gone = model;
  model = null;
  setReady(false);
  show($('loaded'), false);
  show($('load-row'), true);
  showSize();
  $('load').focus();
  await gone?.dispose();
  announce('The model is unloaded');
  showDiagnostics();
}

// ---- Generating ----------------------------------------------------------------------------------------------------

async function runOne(panel, schedule, maxTokens, signal) {
  panel.start();
  const messages = [{ role: 'user', content: $('prompt').value }];
  const generation = model.generate(messages, { schedule, maxTokens, signal });
  try {
    for await (const part of generation) panel.add(part);
    const result = await generation.result;
    panel.finish(result);
    const { text, tokens, ...counts } = result;
    record.runs.push({ schedule, tokens: tokens.length, ...counts });
    return result;
  } catch (error) {
    if (error.partial) panel.finish(error.partial);
    else panel.end('failed');
    throw error;
  }
}

function showComparison([first, second], [a, b]) {
  const verdict = $('verdict');
  const equal = first.tokens.length === second.tokens.length && first.tokens.every((id, i) => id === second.tokens[i]);
  const speed = (second.timings.decode / second.tokens.length) / (first.timings.decode / first.tokens.length);
  const head = document.createElement('strong');
  head.textContent = `Texts identical: ${equal ? 'yes' : 'no'}`;
  const body = document.createElement('span');
  body.textContent = `${nameOf(a)} took ${first.calls} model calls for ${first.tokens.length} tokens, ${nameOf(b)} ${second.calls}. On this device ${nameOf(speed >= 1 ? a : b)} was ${decimal(Math.max(speed, 1 / speed), 2)} times as fast.`;
  verdict.replaceChildren(head, body);
  verdict.dataset.equal = equal ? 'yes' : 'no';
  show(verdict, true);
  return equal;
}

async function generate() {
  const maxTokens = Number($('max-tokens').value);
  const schedules = [$('schedule').value, $('compare').value].filter((name, i, all) => name !== '' && all.indexOf(name) === i);
  running = new AbortController();
  const button = $('generate');
  button.textContent = 'Stop';
  button.classList.add('stop');
  showError($('generate-error'), null);
  show($('verdict'), false);
  show($('answers'), true);
  $('panels').replaceChildren();
  const panels = schedules.map((schedule) => new Panel($('panels'), nameOf(schedule), maxTokens));
  show($('legend'), schedules.some((schedule) => schedule !== 'autoregressive'));
  announce('Generating');
  try {
    const results = [];
    for (const [i, schedule] of schedules.entries()) results.push(await runOne(panels[i], schedule, maxTokens, running.signal));
    const [{ tokens, timings }] = results;
    let summary = `Done: ${tokens.length} tokens in ${duration(timings.total)}.`;
    if (results.length === 2) summary += ` Texts identical: ${showComparison(results, schedules) ? 'yes' : 'no'}.`;
    announce(summary);
  } catch (error) {
    if (error.code === 'Aborted') {
      for (const panel of panels) if (panel.state.textContent === 'waiting') panel.end('not started');
      announce('Stopped');
    } else {
      showError($('generate-error'), error, 'The answer could not be generated.');
      if (error.code === 'DeviceLost' || error.code === 'Internal') await unload();
    }
  } finally {
    running = null;
    button.textContent = 'Generate';
    button.classList.remove('stop');
    showDiagnostics();
  }
}

// ---- Wiring --------------------------------------------------------------------------------------------------------

$('compare').append(new Option('Nothing', ''));
for (const [name, [label]] of Object.entries(SCHEDULES)) {
  $('schedule').append(new Option(label, name));
  $('compare').append(new Option(label, name));
}
$('schedule').addEventListener('change', explainSchedule);
explainSchedule();

$('load').addEventListener('click', startLoading);
$('load-cancel').addEventListener('click', () => loading?.abort());
$('unload').addEventListener('click', unload);
$('form').addEventListener('submit', (event) => {
  event.preventDefault();
  if (running) running.abort();
  else if (model) generate();
});
$('prompt').addEventListener('keydown', (event) => {
  if (event.key === 'Enter' && (event.ctrlKey || event.metaKey) && !running) $('form').requestSubmit();
});
document.addEventListener('keydown', (event) => {
  if (event.key === 'Escape') running?.abort();
});
for (const chip of document.querySelectorAll('[data-sample]')) {
  chip.addEventListener('click', () => {
    $('prompt').value = chip.dataset.sample;
    $('prompt').focus();
  });
}
$('copy').addEventListener('click', async () => {
  showDiagnostics();
  try {
    await navigator.clipboard.writeText($('diagnostics-text').textContent);
    $('copied').textContent = 'Copied.';
  } catch {
    getSelection().selectAllChildren($('diagnostics-text'));
    $('copied').textContent = 'Selected: copy it with your keyboard.';
  }
});

look();
