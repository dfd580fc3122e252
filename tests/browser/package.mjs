// The npm package as its users meet it: on a server, in a type checker, in a tarball.

import assert from 'node:assert/strict';
import { execFileSync, spawnSync } from 'node:child_process';
import fs from 'node:fs';
import path from 'node:path';
import { transform } from 'esbuild';
import { record, ROOT, test } from './harness.mjs';

const PKG = path.join(ROOT, 'pkg');
const manifest = JSON.parse(fs.readFileSync(path.join(PKG, 'package.json'), 'utf8'));

/** A folder under target/ in which `forecall` resolves as if installed. */
function consumer(name) {
  const folder = path.join(ROOT, 'target', 'consumers', name);
  fs.rmSync(folder, { recursive: true, force: true });
  fs.mkdirSync(path.join(folder, 'node_modules'), { recursive: true });
  fs.symlinkSync(PKG, path.join(folder, 'node_modules', 'forecall'), 'dir');
  return folder;
}

test('package: imports on a server, where nothing of a browser is', () => {
  const folder = consumer('server');
  fs.writeFileSync(
    path.join(folder, 'main.mjs'),
    `for (const name of ['navigator', 'window', 'self', 'document', 'Worker', 'location']) {
       Object.defineProperty(globalThis, name, { configurable: true, get() { throw new Error(name + ' was touched'); } });
     }
     const { load, ForecallError } = await import('forecall');
     for (const name of ['navigator', 'document', 'Worker', 'location']) delete globalThis[name];
     try { await load('http://127.0.0.1:9/model/'); console.log('loaded'); }
     catch (error) { console.log(JSON.stringify([error instanceof ForecallError, error.code])); }`,
  );
  const { stdout, stderr, status } = spawnSync(process.execPath, ['main.mjs'], { cwd: folder, encoding: 'utf8' });
  assert.equal(status, 0, stderr);
  assert.deepEqual(JSON.parse(stdout), [true, 'Unsupported']);
});

const PROGRAM = `
import { availability, ForecallError, load, storage, type ErrorCode, type Generation, type GenerateResult, type LoadProgress, type Model, type ModelSource, type Part, type StoredModel, type Warning } from 'forecall';

export async function main(signal: AbortSignal): Promise<string | null> {
  const { device, download, limit }: Awaited<ReturnType<typeof availability>> = await availability('owner/name', { revision: 'main', quantize: 'q4' });
  if (!device.webgpu || download === null) return limit ?? device.reason;
  const onProgress = ({ phase, bytes, rate }: LoadProgress): void => void [phase satisfies string, bytes satisfies number, rate satisfies number | null];
  const onWarning = ({ code, message }: Warning): void => void [code satisfies string, message satisfies string];
  const sources: ModelSource[] = [new URL('https://example.org/model/'), [new File([], 'config.json')], document.createElement('input').files!, { 'config.json': '/c.json', 'model.safetensors': new URL('https://example.org/w') }];
  const stored: StoredModel[] = await storage.list();
  for (const model of stored) if (!model.complete) await storage.delete(model);
  if ((await storage.size()) > 1e9 && !(await storage.persist())) await storage.delete('owner/name');
  await using model: Model = await load(sources[0]!, { onProgress, onWarning, signal, backend: 'webgpu', contextLength: 2048, adapter: 'none', quantize: 'q8', store: false, fetch, hubUrl: 'https://example.org' });
  const generation: Generation = model.generate([{ role: 'user', content: 'Hello' }], { schedule: 'packed', maxTokens: 8, signal });
  for await (const part of generation) {
    const { text, tokens }: Part = part;
    void [text satisfies string, tokens satisfies number[]];
  }
  const stream: ReadableStream<Part> = model.generate({ tokens: [1, 2, 3] });
  await stream.cancel();
  try {
    const result: GenerateResult = await model.generate('text').result;
    return result.text;
  } catch (error) {
    const code: ErrorCode | undefined = error instanceof ForecallError ? error.code : undefined;
    return code ?? null;
  }
}

// @ts-expect-error: an option that is not there
export const wrongOption = load('x', { temperature: 1 });
// @ts-expect-error: a schedule that is not there
export const wrongSchedule = (model: Model) => model.generate('x', { schedule: 'fastest' });
`;

for (const [name, options] of Object.entries({
  bundler: { module: 'esnext', moduleResolution: 'bundler' },
  node16: { module: 'node16', moduleResolution: 'node16' },
})) {
  test(`package: types compile under moduleResolution ${name}, libraries checked too`, () => {
    const folder = consumer(`types-${name}`);
    fs.writeFileSync(path.join(folder, 'package.json'), '{ "type": "module" }');
    fs.writeFileSync(path.join(folder, 'main.ts'), PROGRAM);
    const compilerOptions = { ...options, target: 'es2022', lib: ['es2022', 'dom'], strict: true, skipLibCheck: false, noEmit: true, types: [] };
    fs.writeFileSync(path.join(folder, 'tsconfig.json'), JSON.stringify({ compilerOptions, files: ['main.ts'] }));
    const tsc = (...extra) => spawnSync(path.join(ROOT, 'node_modules', '.bin', 'tsc'), ['-p', folder, ...extra], { encoding: 'utf8' });
    const good = tsc();
    assert.equal(good.status, 0, good.stdout);
    fs.appendFileSync(path.join(folder, 'main.ts'), '\nexport const wrong: number = load;\n');
    assert.match(tsc().stdout, /TS2322/, 'the checker does not see these types');
  });
}

test('package: the tarball holds what exports name, no sources, no scripts, no dependencies', () => {
  const [{ files }] = JSON.parse(execFileSync('npm', ['pack', '--dry-run', '--json', '--ignore-scripts'], { cwd: PKG, encoding: 'utf8' }));
  const names = files.map((file) => file.path);
  const targets = Object.values(manifest.exports).flatMap((entry) => (typeof entry === 'string' ? [entry] : Object.values(entry)));
  for (const target of targets) assert.ok(names.includes(target.replace('./', '')), `${target} is not in the tarball`);
  for (const needed of ['README.md', 'LICENSE', 'wasm/forecall.js', 'dist/worker.js']) assert.ok(names.includes(needed), `${needed} is not in the tarball`);
  const strange = names.filter((name) => !/^(dist\/.*\.(js|d\.ts)|wasm\/forecall[\w.]*\.(js|wasm|d\.ts)|README\.md|LICENSE|package\.json)$/.test(name));
  assert.deepEqual(strange, []);
  assert.equal(Object.keys(manifest.exports['.'])[0], 'types');
  assert.deepEqual([manifest.scripts, manifest.dependencies, manifest.type], [undefined, undefined, 'module']);
});

test('package: the scripts of package and page are in the syntax of Chrome 113, Safari 16.4 and Firefox 120', async () => {
  const lowered = async (code) => {
    const to = async (target) => (await transform(code, { target, format: 'esm', supported: { 'regexp-unicode-property-escapes': true } })).code;
    return (await to(['chrome113', 'safari16.4', 'firefox120'])) !== (await to('esnext'));
  };
  const folders = [path.join(PKG, 'dist'), path.join(PKG, 'wasm'), path.join(ROOT, 'www')];
  const scripts = folders.flatMap((folder) => fs.readdirSync(folder).filter((name) => name.endsWith('.js')).map((name) => path.join(folder, name)));
  assert.ok(scripts.length > 15, `${scripts.length} scripts`);
  const newer = [];
  for (const file of scripts) if (await lowered(fs.readFileSync(file, 'utf8'))) newer.push(path.relative(ROOT, file));
  assert.deepEqual(newer, []);
  // Control: syntax that came later.
  assert.equal(await lowered('using file = open();'), true);
});

test('package: sizes stay small, and no address of a third party is in the code but that of the hub, which repo ids mean', () => {
  const sources = fs.readdirSync(path.join(PKG, 'dist')).filter((name) => name.endsWith('.js')).map((name) => path.join(PKG, 'dist', name));
  const glue = path.join(PKG, 'wasm', 'forecall.js');
  const text = [...sources, glue].map((file) => fs.readFileSync(file, 'utf8')).join('\n');
  // The program, not Node's own gzip, which is made for speed and packs 2 % worse.
  const gzip = (input) => execFileSync('gzip', ['-9', '-c'], { input, maxBuffer: 1 << 24 }).length;
  const wasm = fs.readFileSync(path.join(PKG, 'wasm', 'forecall_bg.wasm'));
  const sizes = { js: { raw: text.length, gzip: gzip(text) }, wasm: { raw: wasm.length, gzip: gzip(wasm) } };
  record('package-sizes.json', sizes);
  assert.ok(sizes.js.gzip < 40_000, `the JavaScript has ${sizes.js.gzip} bytes gzipped`);
  assert.ok(sizes.wasm.gzip < 1_500_000, `the wasm has ${sizes.wasm.gzip} bytes gzipped`);
  const addresses = text.match(/https?:\/\/[\w.-]+/g) ?? [];
  assert.deepEqual(addresses.filter((address) => !/(developer\.mozilla|rustwasm)/.test(address)), ['https://huggingface.co']);
});
