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
import { busyBetween, commonStart, count, GGUF, GGUF_FOLDER, median, needs, processorTime, speeds, summary, table, TARGET, unpackGguf } from './peer.mjs';

const HERE = path.dirname(fileURLToPath(import.meta.url));
const RUN_MS = 10 * 60_000;

const { values } = parseArgs({ options: { rounds: { type: 'string', default: '6' }, tokens: { type: 'string', default: '128' }, also: { type: 'string' } } });
const ROUNDS = count(values, 'rounds');
const TOKENS = count(values, 'tokens');

/** wllama's instances in the page. */
const PEERS = [
  { name: 'wllama', gguf: `/gguf/${GGUF}`, compat: false },
  { name: 'wllama, compat build', gguf: `/gguf/${GGUF}`, compat: true },
  ...(values.also === undefined ? [] : [{ name: `wllama, ${path.basename(values.also)}`, gguf: `/also/${path.basename(values.also)}`, compat: false }]),
];

const RUNNERS = [
  ...PEERS.map(({ name }, instance) => ({ name, engine: 'wllama', instance })),
  { name: 'Forecall, autoregressive', engine: 'forecall', options: { schedule: 'autoregressive' } },
  { name: 'Forecall, packed, verify 1, draft 2', engine: 'forecall', options: { schedule: 'packed', verifyWidth: 1, draftWidth: 2 } },
  { name: 'Forecall, packed, verify 2, draft 3', engine: 'forecall', options: { schedule: 'packed', verifyWidth: 2, draftWidth: 3 } },
  { name: 'Forecall, its own choice', engine: 'forecall', options: {} },
];

// ---- what is needed ------------------------------------------------------------------------------------------------

function installPeer() {
  const { dependencies } = JSON.parse(fs.readFileSync(path.join(HERE, 'package.json'), 'utf8'));
  const installed = (name) => {
    const manifest = path.join(HERE, 'node_modules', name, 'package.json');
    return fs.existsSync(manifest) ? JSON.parse(fs.readFileSync(manifest, 'utf8')).version : null;
  };
  const missing = () => Object.entries(dependencies).find(([name, wanted]) => installed(name) !== wanted);
  if (missing()) execFileSync('npm', ['ci', '--no-audit', '--no-fund'], { cwd: HERE, stdio: 'inherit' });
  if (missing()) throw new Error(`${missing().join(' ')} is wanted, ${installed(missing()[0])} is installed`);
  return dependencies['@wllama/wllama'];
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
    '/wllama-compat/': path.join(HERE, 'node_modules', '@wllama', 'wllama-compat', 'wasm'),
  },
});
const browser = await chromium.launch({ headless: true, ...stockChromium() });
try {
  const page = await browser.newPage();
  page.setDefaultTimeout(RUN_MS);
  page.on('pageerror', (error) => console.error(`page: ${error}`));
  await page.goto(`${server.url}page.html`);
  await page.waitForFunction(() => window.runOne !== undefined);
  const engines = await page.evaluate(([a, b]) => window.loadAll(a, b), [PEERS, `/models/${DEMO_MODEL}/`]);
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
      const busyCores = busyBetween(before, after);
      const record = { name: runner.name, round, prompt, ...run, busyCores, load: os.loadavg()[0] };
      runs.push(record);
      const { prefill, decode } = speeds(run);
      console.error(`round ${round + 1}, ${prompt}, ${runner.name}: prefill ${prefill.toFixed(0)}, decode ${decode.toFixed(1)} tokens/s; ${busyCores.toFixed(1)} cores busy`);
    }
  }

  const rows = summary(RUNNERS.map(({ name }) => name), runs);
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
