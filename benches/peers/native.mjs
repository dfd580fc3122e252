// Forecall's command line against llama.cpp natively, through the Python wheel of xllamacpp: the same 4-bit weights, the same
// prompts, the same number of threads, by turns.
//
//   node benches/peers/native.mjs [--rounds 6] [--tokens 128] [--threads 2]
//
// Prints a table and writes target/peers-native.json and target/peers-native.txt. Needs what `npm run setup` makes and
// `cargo build --release`; installs the wheel into a virtual environment in target/peers.

import { execFile, execFileSync, spawn } from 'node:child_process';
import fs from 'node:fs';
import os from 'node:os';
import path from 'node:path';
import readline from 'node:readline';
import { fileURLToPath } from 'node:url';
import { parseArgs, promisify } from 'node:util';
import { DEMO_MODEL, ROOT } from '../../tools/setup.mjs';
import { busyBetween, commonStart, count, GGUF_FOLDER, median, needs, processorTime, speeds, summary, table, TARGET, unpackGguf } from './peer.mjs';

const HERE = path.dirname(fileURLToPath(import.meta.url));
const CONTEXT = 1024;
const FORECALL = path.join(TARGET, 'release', 'forecall');

const { values } = parseArgs({ options: { rounds: { type: 'string', default: '6' }, tokens: { type: 'string', default: '128' }, threads: { type: 'string', default: '2' } } });
const ROUNDS = count(values, 'rounds');
const TOKENS = count(values, 'tokens');
const THREADS = values.threads === '1' ? 1 : count(values, 'threads');

const RUNNERS = [
  { name: 'llama.cpp', run: (prompt) => runLlama(prompt, TOKENS) },
  { name: 'Forecall, autoregressive', run: (prompt) => runForecall(prompt, ['--schedule', 'autoregressive'], TOKENS) },
  { name: 'Forecall, packed, verify 1, draft 2', run: (prompt) => runForecall(prompt, ['--schedule', 'packed', '--verify-width', '1', '--draft-width', '2'], TOKENS) },
  { name: 'Forecall, packed, verify 2, draft 2', run: (prompt) => runForecall(prompt, ['--schedule', 'packed', '--verify-width', '2', '--draft-width', '2'], TOKENS) },
  { name: 'Forecall, its own choice', run: (prompt) => runForecall(prompt, [], TOKENS) },
];

/** A Python with the wheel that requirements.txt names. */
function installPeer() {
  const venv = path.join(GGUF_FOLDER, 'venv');
  const python = path.join(venv, 'bin', 'python');
  const [name, version] = fs.readFileSync(path.join(HERE, 'requirements.txt'), 'utf8').trim().split('==');
  const installed = () => {
    if (!fs.existsSync(python)) return null;
    const script = `from importlib import metadata\ntry: print(metadata.version("${name}"))\nexcept metadata.PackageNotFoundError: print("none")`;
    return execFileSync(python, ['-c', script], { encoding: 'utf8' }).trim();
  };
  if (installed() === version) return { python, version };
  fs.mkdirSync(GGUF_FOLDER, { recursive: true });
  execFileSync('python3', ['-m', 'venv', venv], { stdio: 'inherit' });
  execFileSync(python, ['-m', 'pip', 'install', '--quiet', '--only-binary=:all:', '--requirement', path.join(HERE, 'requirements.txt')], { stdio: 'inherit' });
  if (installed() !== version) throw new Error(`${name} ${version} is wanted, ${installed()} is installed`);
  return { python, version };
}

let lines;
let llama;

async function runLlama({ ids }, tokens) {
  const start = performance.now();
  llama.stdin.write(`${JSON.stringify({ ids, count: tokens })}\n`);
  const { value, done } = await lines.next();
  if (done) throw new Error('llama.cpp ended');
  const { timings, text } = JSON.parse(value);
  if (timings.cache_n !== 0) throw new Error(`llama.cpp took ${timings.cache_n} prompt tokens from its cache`);
  return { promptTokens: timings.prompt_n, tokens: timings.predicted_n, text, prefill: timings.prompt_ms, decode: timings.predicted_ms, total: performance.now() - start };
}

async function runForecall({ ids }, options, tokens) {
  const words = ['generate', '--model', path.join(ROOT, 'models', DEMO_MODEL), '--backend', 'cpu', '--context', `${CONTEXT}`, '--tokens', ids.join(), '--max-tokens', `${tokens}`, '--ignore-eos', '--json', ...options];
  const { stdout } = await promisify(execFile)(FORECALL, words, { env: { ...process.env, RAYON_NUM_THREADS: `${THREADS}` }, maxBuffer: 1 << 26 });
  const done = JSON.parse(stdout);
  return {
    promptTokens: ids.length,
    tokens: done.tokens.length,
    ids: done.tokens,
    text: done.text,
    schedule: done.schedule,
    calls: done.calls,
    rows: done.rows,
    prefill: done.timings_ms.prefill,
    decode: done.timings_ms.decode,
    total: done.timings_ms.prefill + done.timings_ms.decode,
  };
}

needs('target/release/forecall', 'cargo build --release');
needs(`models/${DEMO_MODEL}/config.json`, 'npm run setup');
const { python, version } = installPeer();
llama = spawn(python, [path.join(HERE, 'native.py'), unpackGguf(), `${THREADS}`, `${CONTEXT}`], { stdio: ['pipe', 'pipe', 'ignore'] });
lines = readline.createInterface({ input: llama.stdout })[Symbol.asyncIterator]();
try {
  const { system } = JSON.parse((await lines.next()).value);
  const prompts = JSON.parse(fs.readFileSync(path.join(HERE, 'prompts.json'), 'utf8'));
  const names = Object.keys(prompts);
  await runLlama(prompts[names[0]], 8);
  const runs = [];
  for (let round = 0; round < ROUNDS; round += 1) {
    const prompt = names[round % names.length];
    for (let i = 0; i < RUNNERS.length; i += 1) {
      // Another one is the first in every round.
      const { name, run } = RUNNERS[(i + round) % RUNNERS.length];
      const before = processorTime();
      const done = await run(prompts[prompt]);
      const busyCores = busyBetween(before, processorTime());
      if (done.promptTokens !== prompts[prompt].ids.length) throw new Error(`${name} read ${done.promptTokens} prompt tokens`);
      if (done.tokens !== TOKENS) throw new Error(`${name} made ${done.tokens} tokens, not ${TOKENS}`);
      runs.push({ name, round, prompt, ...done, busyCores, load: os.loadavg()[0] });
      const { prefill, decode } = speeds(done);
      console.error(`round ${round + 1}, ${prompt}, ${name}: prefill ${prefill.toFixed(0)}, decode ${decode.toFixed(1)} tokens/s; ${done.schedule ?? ''} ${busyCores.toFixed(1)} cores busy`);
    }
  }
  const rows = summary(RUNNERS.map(({ name }) => name), runs);
  const agreement = names.slice(0, ROUNDS).map((prompt) => {
    const of = (name) => runs.find((run) => run.name === name && run.prompt === prompt);
    const own = RUNNERS.slice(1).map(({ name }) => of(name));
    return { prompt, sameStart: commonStart(of('llama.cpp').text, own[0].text), characters: own[0].text.length, schedulesIdentical: new Set(own.map((run) => run.ids.join())).size === 1 };
  });
  const loads = runs.map((run) => run.load);
  const text = [
    `llama.cpp (xllamacpp ${version}) and Forecall on the CPU natively, ${THREADS} ${THREADS === 1 ? 'thread' : 'threads'} each`,
    `${os.cpus()[0].model}, ${os.cpus().length} cores; ${median(runs.map((run) => run.busyCores)).toFixed(1)} of them busy in the median run; load ${Math.min(...loads).toFixed(1)} to ${Math.max(...loads).toFixed(1)}`,
    `llama.cpp says: ${system}`,
    `${agreement.length} prompts of ${prompts[names[0]].ids.length} tokens, ${TOKENS} new tokens, ${ROUNDS} rounds by turns; median (least to most); ratio to llama.cpp: median over rounds`,
    '',
    table(rows),
    '',
    `Greedy text, Forecall against llama.cpp: ${agreement.map((a) => `${a.prompt} ${a.sameStart} of ${a.characters} characters`).join(', ')}; Forecall's schedules ${agreement.every((a) => a.schedulesIdentical) ? 'identical' : 'DIFFER'}.`,
    `Forecall's own choices: ${[...new Set(runs.filter((run) => run.name === 'Forecall, its own choice').map((run) => run.schedule))].join(', ')}`,
  ].join('\n');
  console.log(text);
  fs.writeFileSync(path.join(TARGET, 'peers-native.txt'), `${text}\n`);
  fs.writeFileSync(path.join(TARGET, 'peers-native.json'), `${JSON.stringify({ version, system, rounds: ROUNDS, tokens: TOKENS, threads: THREADS, rows, agreement, runs }, null, 2)}\n`);
  if (!agreement.every((a) => a.schedulesIdentical)) process.exitCode = 1;
} finally {
  llama.stdin.end();
}
