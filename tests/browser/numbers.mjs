// The wasm module's own arithmetic, in this process instead of a page: raw logits of the golden checkpoints on the CPU path
// (SIMD128), against the vectors that the native path is held against (tests/golden.rs), with the bounds stated there.

import assert from 'node:assert/strict';
import fs from 'node:fs';
import path from 'node:path';
import { ROOT, test } from './harness.mjs';

const GOLDEN = path.join(ROOT, 'tests', 'golden');
/** Checkpoints by how their weights are stored, so that every kind of product runs: all of those in `tests/golden.rs`. */
const FLOATS = [
  'tiny-llama', 'tiny-llama-tied', 'tiny-llama3', 'tiny-mistral', 'tiny-qwen2', 'tiny-qwen3', 'tiny-smollm3', 'tiny-ministral3',
  'tiny-nemotron', 'tiny-nemotron-base', 'tiny-nemotron-trained', 'tiny-nemotron-bf16',
  'tiny-setdlm', 'tiny-setdlm-trained', 'tiny-setdlm-f16', 'tiny-setdlm-bf16',
];
const GROUPS = ['tiny-llama-q4', 'tiny-llama-q8-bf16', 'tiny-nemotron-q4'];
/** Largest error as a share of the logits' range: f32 weights; inputs in 16 bits; an adapter in groups of 8 bits. */
const BOUND = { floats: 1e-4, groups: 5e-4, adapter: 4e-2 };
/** Masks of the draft block. */
const WIDTH = 7;

/** The tensors of a safetensors file, which are f32. */
function tensors(file) {
  const bytes = fs.readFileSync(file);
  const length = Number(bytes.readBigUInt64LE(0));
  const header = JSON.parse(bytes.toString('utf8', 8, 8 + length));
  return (name) => {
    const { dtype, shape, data_offsets: [start, end] } = header[name];
    assert.equal(dtype, 'F32');
    return { shape, values: new Float32Array(new Uint8Array(bytes.subarray(8 + length + start, 8 + length + end)).buffer) };
  };
}

/** The largest difference in units of `range`; infinite where a value is missing or no number. */
function distance(got, want, range) {
  if (got.length !== want.length || got.length === 0) return Infinity;
  let most = 0;
  for (let i = 0; i < got.length; i++) {
    const difference = Math.abs(got[i] - want[i]);
    if (!(difference <= most)) most = Number.isNaN(difference) ? Infinity : difference;
  }
  return most / range;
}

let engine;

/** The module as it is shipped. */
async function wasm() {
  engine ??= (async () => {
    const module = await import(path.join(ROOT, 'pkg', 'wasm', 'forecall.js'));
    module.initSync({ module: fs.readFileSync(path.join(ROOT, 'pkg', 'wasm', 'forecall_bg.wasm')) });
    return module;
  })();
  return engine;
}

/** Loads a folder as files that a user picked. */
async function load(folder) {
  const at = (file) => path.join(folder, file);
  const picked = {
    size: async (file) => (fs.existsSync(at(file)) ? fs.statSync(at(file)).size : null),
    read: async (file, start, end) => new Uint8Array(fs.readFileSync(at(file)).subarray(start, end)),
  };
  const options = {
    source: { kind: 'files' },
    drafter: 'auto',
    precision: 'f32',
    backend: 'cpu',
    adapter: { subgroups: false, subgroupSizes: [0, 0], software: false },
    store: false,
  };
  return (await wasm()).load(JSON.stringify(options), { picked }, () => true);
}

for (const [kind, names] of [['floats', FLOATS], ['groups', GROUPS]]) {
  test(`numbers: logits by SIMD128 agree with the truth, weights as ${kind}`, async () => {
    for (const name of names) {
      const folder = path.join(GOLDEN, name);
      const { prompt, logit_range: range } = JSON.parse(fs.readFileSync(path.join(folder, 'golden.json'), 'utf8'));
      const truth = tensors(path.join(folder, 'golden.safetensors'));
      const model = await load(folder);
      const { adapter } = JSON.parse(model.info()).drafter;
      const all = await model.logits(new Uint32Array(prompt), WIDTH);
      const { shape: [rows, vocab], values: causal } = truth('causal.logits');
      const draft = truth(`draft.w${WIDTH}.logits`).values;
      const got = all.subarray(0, rows * vocab);
      const draftBound = adapter && kind === 'groups' ? BOUND.adapter : BOUND[kind];
      for (const [what, got, want, bound] of [
        ['causal', all.subarray(0, rows * vocab), causal, BOUND[kind]],
        ['draft', all.subarray(rows * vocab), draft, draftBound],
      ]) {
        const error = distance(got, want, range);
        assert.ok(error < bound, `${name}, ${what}: ${error}`);
        // Controls: a value that is off, a row too few.
        const off = want.slice();
        off[off.length >> 1] += 2 * bound * range;
        assert.ok(distance(got, off, range) > bound);
        assert.equal(distance(got.subarray(vocab), want, range), Infinity);
      }
      // Calls of few rows run other loops and have the same bits; mask rows that verify come out in other calls, too.
      for (const few of [1, 2, 3, 5]) {
        const part = await model.logits(new Uint32Array(prompt.slice(0, few)));
        assert.deepEqual(part, got.slice(0, few * vocab), `${name}: ${few} rows`);
        assert.notDeepEqual(part, got.slice(vocab, (few + 1) * vocab), 'control: the next rows');
      }
      model.dispose();
    }
  }, { seconds: 60 });
}
