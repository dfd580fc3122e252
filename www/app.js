// The demo page: what any page can do with the package, and nothing else.

import { availability, load, sourceName, storage } from './pkg/dist/index.js';
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
  'block-diffusion': ['Block diffusion', 'every call fills in more of a block of masks'],
};
const nameOf = (schedule) => SCHEDULES[schedule]?.[0] ?? schedule;
/** How much of the download is announced to screen readers. */
const ANNOUNCE_STEP = 0.25;
/** Characters of an answer that are read out at once; a longer one is for whoever reads it to go through. */
const READ_OUT = 800;
/** Silence after which a download is said to wait. */
const SILENCE_MS = 4000;

const $ = (id) => document.getElementById(id);
const query = new URLSearchParams(location.search);
const adapterAsked = query.get('adapter');
const options = {
  ...(adapterAsked && { adapter: adapterAsked }),
  ...(query.has('backend') && { backend: query.get('backend') }),
  ...(query.has('precision') && { precision: query.get('precision') }),
  ...(query.has('context') && { contextLength: Number(query.get('context')) }),
  ...(query.get('quantize') && { quantize: query.get('quantize') }),
  ...(query.has('revision') && { revision: query.get('revision') }),
  ...(query.has('hub') && { hubUrl: query.get('hub') }),
};

/** What `load` gets: a repo id, an address, or picked files. */
let source = query.get('model')?.trim() || DEMO_MODEL;
let found = null;
let looking = null;
let model = null;
let loading = null;
let running = null;
const record = { page: location.origin + location.pathname, model: null, options, browser: navigator.userAgent, crossOriginIsolated, runs: [], warnings: [], errors: [] };

const show = (element, visible) => {
  element.hidden = !visible;
};
const visible = (element) => element.getClientRects().length > 0;
/** Where the focus went with what had it, gives it to the first of these that can have it. */
function refocus(...ids) {
  const { activeElement: held, body } = document;
  if (held && held !== body && visible(held)) return;
  const next = [...ids, 'another-title'].map($).find((element) => visible(element) && !element.disabled);
  next?.focus({ preventScroll: true });
}
const announce = (text) => {
  $('status').textContent = text;
};

/** A message as a sentence. One that begins with a file's name keeps it. */
const sentence = (message) => message.replace(/^[a-z]+(?=[ ,])/, (word) => word.charAt(0).toUpperCase() + word.slice(1));

/** A refusal as a person wants it: what happened, then what may help. */
function showError(box, error, title) {
  box.replaceChildren();
  if (error) {
    const [head, body] = [document.createElement('strong'), document.createElement('span')];
    head.textContent = title;
    body.textContent = sentence(error.message);
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
  $('diagnostics-text').textContent = JSON.stringify({ ...record, device: found?.device ?? null, availability: found && { ...found, device: undefined }, loaded: model?.info ?? null }, null, 2);
}

// ---- The device and the model's size -------------------------------------------------------------------------------

function showDevice({ device, backend, available, reason }) {
  const verdict = $('device-verdict');
  if (backend === null) {
    verdict.textContent = 'No GPU for this page';
    verdict.dataset.state = 'bad';
    showError($('device-help'), { message: device.reason, code: 'Unsupported' }, 'The model cannot run here.');
    return;
  }
  const software = device.adapter?.fallback;
  verdict.textContent = backend === 'cpu' ? 'Runs on your CPU, slower than on a GPU' : software ? 'Runs on a GPU in software, slower than on the CPU itself' : 'Runs on your GPU';
  verdict.dataset.state = backend === 'webgpu' && !software ? 'good' : 'fair';
  // What is wrong with a model is said beside the model.
  const why = available ? reason : device.reason;
  $('device-reason').textContent = backend === 'cpu' && options.backend !== 'cpu' && why ? why : '';
  show($('device-reason'), $('device-reason').textContent !== '');
  const { adapter, limits } = device;
  const name = adapter && (adapter.description || [adapter.vendor, adapter.architecture].filter(Boolean).join(' '));
  const size = device.subgroupMinSize === device.subgroupMaxSize ? device.subgroupMinSize : `${device.subgroupMinSize} to ${device.subgroupMaxSize}`;
  showFacts($('device-facts'), [
    ['GPU adapter', adapter ? name || 'not named by the browser' : 'none'],
    ['16-bit floats', adapter && (device.shaderF16 ? 'yes' : 'no')],
    ['Subgroups', adapter && (device.subgroups ? `yes, of ${size}` : 'no')],
    ['Largest binding', limits && bytes(limits.maxStorageBufferBindingSize)],
    ['Largest buffer', limits && bytes(limits.maxBufferSize)],
    ['Main memory', device.memoryGiB && `${device.memoryGiB >= 8 ? 'at least ' : ''}${device.memoryGiB} GB`],
  ]);
}

/** A stretch of an address as people read it, where it can be. */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** `text` as an address; `null` where it is none, as a repo id is not. */
function addressOf(text) {
  try {
    return new URL(text);
  } catch {
    return null;
  }
}

/** What to call the model, where it is from, and whether somebody else than this server hears of it. */
function placeOf(source) {
  if (typeof source !== 'string') {
    const [folder] = (source[0].webkitRelativePath || 'Your files').split('/');
    return { name: folder, from: 'the files you picked', foreign: false };
  }
  const name = sourceName(source);
  const url = addressOf(name);
  if (!url) return { name, from: addressOf(options.hubUrl)?.host ?? (options.hubUrl ? 'another hub' : 'the Hugging Face hub'), foreign: true };
  const ours = url.origin === location.origin;
  const folder = decoded(url.pathname.split('/').at(-2) ?? '') || url.host;
  return { name: name === sourceName(DEMO_MODEL) ? DEMO_NAME : folder, from: ours ? 'this server' : url.host, foreign: !ours };
}

/** The same of the model and of the draft adapter that the page's address may name. */
function placesOf(source) {
  const place = placeOf(source);
  const { adapter } = options;
  if (!adapter || adapter === 'none') return place;
  const drafter = placeOf(adapter);
  if (!drafter.foreign) return place;
  return { ...place, from: drafter.from === place.from ? place.from : `${place.from}, and its draft adapter from ${drafter.from}`, foreign: true };
}

function showSize(from) {
  const { download, memory, model, limits } = { ...found, limits: found.device.limits };
  const { bytes: missing, stored } = download;
  showFacts($('file-facts'), [
    ['To download', missing > 0 ? bytes(missing) : 'nothing'],
    ['Stored already', stored > 0 ? bytes(stored) : ''],
    ['Memory it takes', bytes(memory.weights + memory.cache + memory.working)],
    ['Largest binding', memory.largestBinding && `${bytes(memory.largestBinding.bytes)} of ${bytes(limits.maxStorageBufferBindingSize)}`],
    ['Weights', model.quantization],
    ['Drafts', model.drafter ? 'yes' : 'no: one token a call'],
  ]);
  const picked = typeof source !== 'string';
  $('model-size').textContent = picked ? 'On this device: nothing is downloaded.' : missing === 0 ? 'Stored on this device: nothing is downloaded.' : `${bytes(missing)} to download from ${from}${stored > 0 ? `, ${bytes(stored)} are here already` : ''}. Nothing is downloaded yet.`;
  $('load').textContent = picked || missing === 0 ? 'Start' : stored > 0 ? 'Go on with the download' : 'Download and start';
  const { needed, left } = found.room;
  const tight = found.available && !picked && missing > 0 && left !== null && needed > left;
  if (tight) warn({ code: 'room', message: `The browser gives this page ${bytes(left)} more to store, and the model would take ${bytes(needed)}: it runs, but will be downloaded again the next time.` });
}

/** Finds out about device and model. Another server hears of this page only when its user says so: with `ask`. */
async function look({ ask = false } = {}) {
  looking?.abort();
  looking = new AbortController();
  const { signal } = looking;
  $('load').disabled = true;
  $('load').textContent = 'Download and start';
  for (const id of ['file-facts', 'unfit', 'ask', 'warnings']) show($(id), false);
  showError($('load-error'), null);
  $('warnings').replaceChildren();
  try {
    const { name, from, foreign } = placesOf(source);
    record.model = name;
    $('model-name').textContent = name;
    $('model-size').textContent = 'Asking for its size…';
    const quiet = foreign && !ask;
    const looked = await availability(quiet ? undefined : source, { ...options, signal });
    if (signal.aborted) return;
    found = looked;
    showDevice(found);
    $('model-size').textContent = quiet ? `From ${from}. Nothing is asked for or downloaded yet.` : '';
    show($('ask'), quiet && found.backend !== null);
    if (found.download) showSize(from);
    if (!found.available && found.backend !== null) {
      const title = found.download ? `This model does not fit this device${found.limit ? `: ${found.limit}` : ''}.` : 'This model cannot be loaded.';
      showError(found.download ? $('unfit') : $('load-error'), { message: found.reason, code: found.download ? 'Unsupported' : 'Fetch' }, title);
    }
    $('load').disabled = !found.available;
  } catch (error) {
    if (signal.aborted) return;
    $('model-size').textContent = '';
    showError($('load-error'), error, 'This model cannot be asked for.');
    // What is wrong with a model or an option says nothing of the device.
    if (!found) showDevice(await availability());
  }
  showDiagnostics();
}

/** Takes another model. */
async function choose(other) {
  if (loading) {
    loading.abort();
    endLoading();
    show($('load-row'), true);
  }
  if (model) await unload({ lookAgain: false });
  source = other;
  const quantize = $('quantize').value;
  delete options.quantize;
  if (quantize) options.quantize = quantize;
  // Those belonged to the model before.
  for (const name of ['adapter', 'revision']) delete options[name];
  if (typeof other === 'string') {
    const address = new URL(location.href);
    for (const name of ['adapter', 'revision', 'quantize']) address.searchParams.delete(name);
    address.searchParams.set('model', other);
    if (quantize) address.searchParams.set('quantize', quantize);
    history.replaceState(null, '', address);
  }
  await look({ ask: true });
  announce($('load').disabled ? 'The model cannot be loaded' : `${$('model-name').textContent}: ${$('model-size').textContent}`);
}

/** Something is amiss, and it runs all the same. */
function warn({ code, message }) {
  record.warnings.push({ code, message });
  const line = document.createElement('p');
  line.textContent = sentence(message);
  $('warnings').append(line);
  show($('warnings'), true);
}

// ---- What is stored ------------------------------------------------------------------------------------------------

async function showStored() {
  const stored = await storage.list().catch(() => []);
  show($('stored'), stored.length > 0);
  $('stored-list').replaceChildren(
    ...stored.map((entry) => {
      const name = entry.source === null ? 'Something unreadable' : placeOf(entry.source).name;
      const [item, text, size, button] = ['li', 'span', 'span', 'button'].map((tag) => document.createElement(tag));
      text.className = 'name';
      text.textContent = `${name}${entry.role === 'adapter' ? ', draft adapter' : ''}`;
      size.className = 'quiet number';
      size.textContent = `${bytes(entry.bytes)}${entry.complete ? '' : ', not whole yet'}`;
      button.type = 'button';
      button.className = 'plain';
      button.textContent = 'Delete';
      button.setAttribute('aria-label', `Delete ${text.textContent}, ${size.textContent}`);
      button.addEventListener('click', () => forget(entry));
      item.append(text, size, button);
      return item;
    }),
  );
}

async function forget(entry) {
  try {
    await storage.delete(entry);
    announce('Deleted');
  } catch (error) {
    showError($('load-error'), error, 'It could not be deleted.');
  }
  await showStored();
  if (visible($('stored-title'))) refocus('stored-title');
  if (!model && !loading) await look({ ask: found?.download !== null });
  refocus('load', 'ask', 'prompt');
}

async function persist() {
  const kept = await storage.persist();
  $('stored-note').textContent = kept ? 'The browser keeps them until you delete them.' : 'The browser may delete them when space runs short; it has its own rules for that.';
}

// ---- Loading -------------------------------------------------------------------------------------------------------

const PHASES = { start: 'Starting', config: 'Reading its description', download: 'Downloading', upload: 'Reading it in', compile: 'Getting ready', ready: 'Ready' };

function progressView() {
  let announced = 0;
  let downloading = false;
  let silence;
  const stop = () => clearTimeout(silence);
  const waits = () => {
    $('progress-rate').textContent = 'No bytes for some seconds: waiting for the connection';
    announce('The download waits for the connection');
  };
  const tell = ({ phase, bytes: done, total, rate, pipelines }) => {
    stop();
    if (phase === 'download') downloading = done < total;
    else if (phase !== 'upload') downloading = false;
    if (downloading) silence = setTimeout(waits, SILENCE_MS);
    // Weights go on as they come, so these two take turns; the slower one is shown.
    if (phase === 'upload' && downloading) return;
    $('progress-label').textContent = PHASES[phase];
    const bar = $('progress');
    $('progress-amount').textContent = '';
    $('progress-rate').textContent = '';
    if (pipelines?.total) {
      bar.value = pipelines.done / pipelines.total;
      $('progress-amount').textContent = `${pipelines.done} of ${pipelines.total} shaders`;
    } else if ((phase === 'download' || phase === 'upload') && total > 0) {
      bar.value = done / total;
      $('progress-amount').textContent = `${bytes(done)} of ${bytes(total)}`;
      if (rate) $('progress-rate').textContent = `${bytes(rate)}/s, ${duration((1000 * (total - done)) / rate)} left`;
      if (phase === 'download' && bar.value >= announced + ANNOUNCE_STEP) {
        announced = Math.floor(bar.value / ANNOUNCE_STEP) * ANNOUNCE_STEP;
        announce(`Downloading: ${Math.round(100 * announced)} percent`);
      }
    } else bar.removeAttribute('value');
  };
  return { tell, stop };
}

function endLoading() {
  loading = null;
  show($('loading'), false);
  showDiagnostics();
  showStored();
}

async function startLoading() {
  const focused = document.activeElement === $('load');
  const mine = new AbortController();
  loading = mine;
  looking?.abort();
  const started = performance.now();
  $('model-size').textContent = $('model-size').textContent.replace(/ Nothing is .*$/, '');
  showError($('load-error'), null);
  show($('load-row'), false);
  show($('loading'), true);
  $('progress').removeAttribute('value');
  if (focused) $('load-cancel').focus();
  announce('Loading the model');
  const { tell, stop } = progressView();
  try {
    const ifMine = (hear) => (what) => loading === mine && hear(what);
    const loaded = await load(source, { ...options, onProgress: ifMine(tell), onWarning: ifMine(warn), signal: mine.signal });
    if (loading !== mine) return void loaded.dispose();
    model = loaded;
    record.loadMs = Math.round(performance.now() - started);
    showLoaded(performance.now() - started);
    endLoading();
  } catch (error) {
    // Another model was chosen while this one stopped.
    if (loading !== mine) return;
    endLoading();
    show($('load-row'), true);
    if (error.code === 'Aborted') {
      announce('Loading was cancelled');
      await look({ ask: true });
    } else {
      showError($('load-error'), error, 'The model could not be loaded.');
      sizeAgain();
    }
    refocus('load', 'ask');
  } finally {
    stop();
  }
}

/** After a failure, what came until then need not come again. */
async function sizeAgain() {
  looking = new AbortController();
  const { signal } = looking;
  const looked = await availability(source, { ...options, signal }).catch(() => null);
  if (signal.aborted || !looked?.available) return;
  found = looked;
  showSize(placesOf(source).from);
}

function showLoaded(ms) {
  const { info } = model;
  const memory = info.memory.weights + info.memory.cache;
  const stored = Object.keys(info.matrixFormats);
  const quantised = stored.filter((format) => /bit/.test(format));
  // On a GPU there is nothing to explain, nor where the address of the page asks for the CPU.
  const why = info.backend === 'webgpu' || options.backend === 'cpu' ? '' : `: ${info.backendReason.replace(/\.$/, '')}`;
  $('model-size').textContent = `Ready in ${duration(ms)}. Runs on the ${info.backend === 'cpu' ? 'CPU' : found?.device.adapter?.fallback ? 'GPU in software' : 'GPU'}${why}.`;
  showFacts($('model-facts'), [
    ['Runs on', `${info.backend === 'webgpu' ? 'WebGPU' : 'the CPU'}${info.subgroups ? ', with subgroups' : ''}`],
    ['Weights', (quantised.length > 0 ? quantised : stored).join('; ')],
    ['Arithmetic', info.precision === 'f16' ? '16-bit storage, 32-bit sums' : '32-bit'],
    ['Guesses with', info.defaultSchedule === 'block-diffusion' ? 'the model itself' : info.drafter ? (info.drafter.adapter ? 'a draft adapter' : 'the model itself') : 'nothing: one token a call'],
    ['Context', `${info.contextLength} tokens`],
    ['Memory on it', bytes(memory)],
  ]);
  show($('loaded'), true);
  show($('file-facts'), false);
  // Such a model does nothing else. For all others that schedule is another text, so it is no choice here.
  const diffuses = info.defaultSchedule === 'block-diffusion';
  const runs = (schedule) => (diffuses || schedule === 'block-diffusion' ? diffuses && schedule === 'block-diffusion' : info.drafter !== null || schedule === 'autoregressive');
  for (const option of $('schedule').options) option.disabled = !runs(option.value);
  for (const option of $('compare').options) option.disabled = option.value !== '' && !runs(option.value);
  $('schedule').value = info.defaultSchedule;
  explainSchedule();
  if ($('compare').selectedOptions[0]?.disabled) $('compare').value = '';
  setReady(true);
  announce('The model is ready');
  if (document.activeElement === document.body || document.activeElement === $('load-cancel')) $('prompt').focus({ preventScroll: true });
}

function explainSchedule() {
  const [name, meaning] = SCHEDULES[$('schedule').value];
  const { backend, drafter, defaultSchedule } = model?.info ?? {};
  const measured = backend === 'cpu' && drafter && defaultSchedule === $('schedule').value ? ' Of those measured on this device while loading it was the fastest.' : '';
  $('schedule-meaning').textContent = `${name}: ${meaning}. ${$('schedule').value === 'block-diffusion' ? 'This model runs no other schedule.' : `The text is the same with every schedule.${measured}`}`;
}

function setReady(ready) {
  $('generate').disabled = !ready;
  $('prompt-hint').textContent = ready ? '' : 'Load the model first.';
}

async function unload({ lookAgain = true } = {}) {
  running?.abort();
  const gone = model;
  model = null;
  setReady(false);
  show($('loaded'), false);
  show($('load-row'), true);
  await gone?.dispose();
  announce('The model is unloaded');
  if (!lookAgain) return;
  await look({ ask: true });
  refocus('load', 'ask');
}

// ---- Generating ----------------------------------------------------------------------------------------------------

async function runOne(panel, schedule, maxTokens, cachePrompt, signal) {
  panel.start();
  const text = $('prompt').value;
  // A model that was not made for chats goes on with the text.
  const prompt = model.info.chatTemplate ? [{ role: 'user', content: text }] : text;
  // The default comes with widths that were measured, as long as nobody names it.
  const named = schedule === model.info.defaultSchedule ? undefined : schedule;
  const generation = model.generate(prompt, { schedule: named, maxTokens, cachePrompt, signal });
  try {
    for await (const part of generation) panel.add(part);
    const result = await generation.result;
    panel.finish(result);
    const { text, tokens, ...counts } = result;
    record.runs.push({ schedule, tokens: tokens.length, ...counts });
    return result;
  } catch (error) {
    if (error.partial) panel.finish(error.partial);
    else panel.end(error.code === 'Aborted' ? 'stopped' : 'failed');
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
  const { length } = first.tokens;
  body.textContent = `${nameOf(a)} took ${first.calls} model call${first.calls === 1 ? '' : 's'} for ${length} token${length === 1 ? '' : 's'}, ${nameOf(b)} ${second.calls}.`;
  // Without calls after the prompt there is nothing to compare.
  if (first.calls > 0 && second.calls > 0 && Number.isFinite(speed) && speed > 0) body.textContent += ` On this device ${nameOf(speed >= 1 ? a : b)} was ${decimal(Math.max(speed, 1 / speed), 2)} times as fast.`;
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
  show($('legend'), schedules.some((schedule) => schedule !== 'autoregressive' && schedule !== 'block-diffusion'));
  announce('Generating');
  // On small screens the answer begins below; the button that stops it stays in sight.
  const calm = matchMedia('(prefers-reduced-motion: reduce)').matches;
  if (panels[0].text.getBoundingClientRect().top > innerHeight - 100) $('generate').scrollIntoView({ block: 'start', behavior: calm ? 'auto' : 'smooth' });
  try {
    const results = [];
    // The second answer must not find the prompt computed by the first.
    const alone = schedules.length === 1;
    for (const [i, schedule] of schedules.entries()) results.push(await runOne(panels[i], schedule, maxTokens, alone, running.signal));
    const [{ tokens, timings }] = results;
    let summary = `Done: ${tokens.length} tokens in ${duration(timings.total)}.`;
    if (results.length === 2) summary += ` Texts identical: ${showComparison(results, schedules) ? 'yes' : 'no'}.`;
    const text = results[0].text ?? '';
    announce(text.length <= READ_OUT ? `${summary} The answer: ${text}` : `${summary} The answer is long: it stands behind the form.`);
  } catch (error) {
    if (error.code === 'Aborted') {
      for (const panel of panels) if (panel.state.textContent === 'waiting') panel.end('not started');
      announce('Stopped');
    } else {
      announce('No answer');
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
$('unload').addEventListener('click', () => unload());
$('ask').addEventListener('click', async () => {
  await look({ ask: true });
  refocus('load');
});
$('source-form').addEventListener('submit', (event) => {
  event.preventDefault();
  const other = $('source').value.trim();
  if (other) choose(other);
  else $('source').focus();
});
$('pick').addEventListener('click', () => $('picked').click());
$('picked').addEventListener('change', () => {
  const files = [...$('picked').files];
  $('picked').value = '';
  if (files.length > 0) choose(files);
});
$('persist').addEventListener('click', persist);
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

$('source').value = query.get('model') ?? '';
if (query.has('model')) $('quantize').value = query.get('quantize') ?? '';
look();
showStored();
window.forecallStarted = true;
