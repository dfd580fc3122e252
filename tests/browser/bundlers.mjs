// The package as bundlers take it: packed, installed from its tarball, built into an app, and run.

import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import fs from 'node:fs';
import path from 'node:path';
import * as esbuild from 'esbuild';
import * as vite from 'vite';
import { serve } from '../../tools/serve.mjs';
import { newPage, ROOT, test } from './harness.mjs';

const TINY = path.join(ROOT, 'tests', 'golden', 'tiny-llama-tied');
const golden = JSON.parse(fs.readFileSync(path.join(TINY, 'golden.json'), 'utf8')).greedy[0];

/** An app's folder, with the package installed from its tarball. */
function app(name, files) {
  const folder = path.join(ROOT, 'target', 'bundlers', name);
  fs.rmSync(folder, { recursive: true, force: true });
  fs.mkdirSync(folder, { recursive: true });
  const [{ filename }] = JSON.parse(execFileSync('npm', ['pack', '--json', '--ignore-scripts', '--pack-destination', folder], { cwd: path.join(ROOT, 'pkg'), encoding: 'utf8' }));
  for (const [file, text] of Object.entries({ 'package.json': '{ "name": "app", "private": true, "type": "module" }', ...files })) {
    fs.mkdirSync(path.dirname(path.join(folder, file)), { recursive: true });
    fs.writeFileSync(path.join(folder, file), text);
  }
  execFileSync('npm', ['install', '--offline', '--no-audit', '--no-fund', '--ignore-scripts', '--no-package-lock', `./${filename}`], { cwd: folder, stdio: 'pipe' });
  // A draft adapter that is a package as Forecall's own is, but small.
  const adapter = path.join(folder, 'node_modules', 'some-adapter');
  fs.cpSync(path.join(TINY, 'draft_adapter'), adapter, { recursive: true });
  for (const file of ['index.js', 'package.json']) fs.copyFileSync(path.join(ROOT, 'adapters', 'smollm2-135m', file), path.join(adapter, file));
  return folder;
}

const HTML = (script) => `<!doctype html><html lang="en"><meta charset="utf-8"><title>An app</title><link rel="icon" href="data:,"><p id="out"></p><script type="module" src="${script}"></script></html>`;
/** What the app does; `options` is what it passes to `load`. */
const MAIN = (imports, options) => `
  import { load } from 'forecall';
  ${imports}
  const run = async () => {
    const model = await load('/model/', { backend: 'cpu', ${options} });
    const { tokens, schedule } = await model.generate({ tokens: ${JSON.stringify(golden.prompt)} }, { maxTokens: ${golden.tokens.length}, ignoreEos: true, schedule: 'packed' }).result;
    await model.dispose();
    return JSON.stringify({ tokens, schedule });
  };
  document.getElementById('out').textContent = await run().catch((error) => error.stack + JSON.stringify(error));
`;
const WITH_ADAPTER_PACKAGE = MAIN("import { adapterFiles } from 'some-adapter';", 'adapter: adapterFiles');

/** Opens the app and expects the reference's ids in it. The model lies at /model/, without its adapter. */
async function expectRuns(url) {
  const page = await newPage('stock');
  await page.goto(url);
  await page.waitForFunction(() => document.getElementById('out').textContent !== '', null, { timeout: 40_000 });
  const said = await page.textContent('#out');
  assert.match(said, /^\{/, said);
  assert.deepEqual(JSON.parse(said), { tokens: golden.tokens, schedule: 'packed' });
  assert.deepEqual(page.errors, []);
}

/** The checkpoint without what the app brings itself. */
function model(folder) {
  const to = path.join(folder, 'model');
  fs.mkdirSync(to, { recursive: true });
  for (const file of ['config.json', 'model.safetensors']) fs.copyFileSync(path.join(TINY, file), path.join(to, file));
}

async function served(folder, body) {
  const server = await serve({ mounts: { '/': folder } });
  try {
    await body(server.url);
  } finally {
    await server.close();
  }
}

test('bundlers: Vite, built: the package and an adapter\'s package, as they are', async () => {
  const folder = app('vite', { 'index.html': HTML('./main.js'), 'main.js': WITH_ADAPTER_PACKAGE });
  model(path.join(folder, 'public'));
  await vite.build({ root: folder, logLevel: 'warn', configFile: false });
  await served(path.join(folder, 'dist'), expectRuns);
}, { seconds: 90 });

test('bundlers: Vite, its development server', async () => {
  const folder = app('vite-dev', { 'index.html': HTML('./main.js'), 'main.js': WITH_ADAPTER_PACKAGE });
  model(path.join(folder, 'public'));
  const server = await vite.createServer({ root: folder, logLevel: 'warn', configFile: false, optimizeDeps: { exclude: ['forecall', 'some-adapter'] }, server: { port: 0, host: '127.0.0.1', fs: { allow: [folder] } } });
  try {
    await server.listen();
    await expectRuns(server.resolvedUrls.local[0]);
  } finally {
    await server.close();
  }
}, { seconds: 90 });

test('bundlers: esbuild, the worker as an entry point, the wasm as a file', async () => {
  const folder = app('esbuild', {
    'dist/index.html': HTML('./main.js'),
    'main.js': MAIN("import wasmUrl from 'forecall/forecall_bg.wasm';", "workerUrl: './forecall-worker.js', wasmUrl, adapter: '/adapter/'"),
  });
  model(path.join(folder, 'dist'));
  fs.cpSync(path.join(folder, 'node_modules', 'some-adapter'), path.join(folder, 'dist', 'adapter'), { recursive: true });
  await esbuild.build({
    absWorkingDir: folder,
    entryPoints: [{ in: 'main.js', out: 'main' }, { in: 'forecall/worker', out: 'forecall-worker' }],
    bundle: true,
    format: 'esm',
    loader: { '.wasm': 'file' },
    outdir: 'dist',
    logLevel: 'warning',
  });
  await served(path.join(folder, 'dist'), expectRuns);
}, { seconds: 90 });
