// Named tests with a time limit each, and the browsers and servers they share.

import fs from 'node:fs';
import path from 'node:path';
import { fileURLToPath } from 'node:url';
import { chromium } from 'playwright-core';
import { lavapipeChromium, stockChromium } from '../../tools/lavapipe-chromium/build.mjs';
import { DEMO_MOUNTS, serve } from '../../tools/serve.mjs';

export const ROOT = path.resolve(path.dirname(fileURLToPath(import.meta.url)), '..', '..');
export const SHOTS = path.join(ROOT, 'target', 'screenshots');
export const DEMO = '/models/smollm2-135m-instruct/';
const TEST_SECONDS = 60;

const tests = [];

/** Registers a test. `seconds` is its time limit. */
export function test(name, run, { seconds = TEST_SECONDS } = {}) {
  tests.push({ name, run, seconds });
}

/** Runs the tests whose name contains `filter`, one after the other. */
export async function runAll(filter) {
  let [passed, failed] = [0, 0];
  for (const { name, run, seconds } of tests.filter((t) => t.name.includes(filter))) {
    const started = Date.now();
    let timer;
    try {
      const limit = new Promise((_, reject) => {
        timer = setTimeout(() => reject(new Error(`took more than ${seconds} s`)), 1000 * seconds);
      });
      await Promise.race([run(), limit]);
      passed += 1;
      console.log(`ok    ${name} (${((Date.now() - started) / 1000).toFixed(1)} s)`);
    } catch (error) {
      failed += 1;
      console.log(`FAIL  ${name} (${((Date.now() - started) / 1000).toFixed(1)} s)\n${String(error.stack ?? error).replace(/^/gm, '      ')}`);
    } finally {
      clearTimeout(timer);
      await closePages();
    }
  }
  await closeAll();
  return { passed, failed };
}

// ---- what tests share ----------------------------------------------------------------------------------------------

let server;
/** The demo's server, which for tests also has their own folder at /tests/. */
export async function site() {
  server ??= await serve({ mounts: { ...DEMO_MOUNTS, '/tests/': path.join(ROOT, 'tests') } });
  return server.url;
}

/** `flagless` is the installed Chromium without the flag that lets a software adapter through: WebGPU without an adapter. */
const LAUNCH = {
  stock: stockChromium,
  lavapipe: lavapipeChromium,
  flagless: () => {
    const options = stockChromium();
    return { ...options, args: options.args.filter((flag) => flag !== '--enable-unsafe-webgpu') };
  },
};
/** On a busy machine a kernel in software may compile or run for longer than Chromium lets its GPU process be silent. */
const PATIENCE = ['--disable-gpu-watchdog'];
const browsers = {};
const pages = new Set();

/** A new page in a context of its own. An uncaught error in it fails whoever looks at `errors`. */
export async function newPage(browser, options = {}) {
  if (!browsers[browser]) {
    const { args, ...launch } = LAUNCH[browser]();
    browsers[browser] = await chromium.launch({ headless: true, ...launch, args: [...args, ...PATIENCE] });
  }
  const context = await browsers[browser].newContext(options);
  if (browser === 'lavapipe') {
    // The package's worker, behind a cure for what ails this driver. `?shipped` is not routed again.
    const body = "import '/tests/browser/storage-params.js'; import '/pkg/dist/worker.js?shipped';";
    await context.route(/\/pkg\/dist\/worker\.js$/, (route) => route.fulfill({ contentType: 'text/javascript', body }));
  }
  const page = await context.newPage();
  page.errors = [];
  page.on('pageerror', (error) => page.errors.push(String(error)));
  pages.add(context);
  return page;
}

/** A page with nothing in it, from which tests import the package as any page would. */
export async function blankPage(browser, options) {
  const page = await newPage(browser, options);
  await page.goto(`${await site()}tests/browser/blank.html`);
  return page;
}

async function closePages() {
  for (const context of pages) await context.close().catch(() => {});
  pages.clear();
}

export async function closeAll() {
  for (const browser of Object.values(browsers)) await browser.close().catch(() => {});
  await server?.close();
}

/** Keeps a record under target/ for people to read. */
export function record(name, value) {
  const file = path.join(ROOT, 'target', name);
  fs.mkdirSync(path.dirname(file), { recursive: true });
  fs.writeFileSync(file, `${JSON.stringify(value, null, 2)}\n`);
}

/** Takes a screenshot of the whole page. */
export async function shoot(page, name) {
  fs.mkdirSync(SHOTS, { recursive: true });
  await page.screenshot({ path: path.join(SHOTS, `${name}.png`), fullPage: true });
}
