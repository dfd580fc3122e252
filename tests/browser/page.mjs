// The demo page as people use it: by mouse, by keyboard, on a phone, with a screen reader. The engine is the double, so
// that what is tested is the page; `demo-model.mjs` runs the page on the real one.

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import path from 'node:path';
import { faultServer, madeUpCheckpoint } from './faults.mjs';
import { DEMO, newPage, ROOT, shoot, SHOTS, site, test } from './harness.mjs';

const AXE = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');
const WEIGHTS = 'model.safetensors';
const DESKTOP = { viewport: { width: 1200, height: 900 } };
const PHONE = { viewport: { width: 360, height: 740 }, hasTouch: true, isMobile: true, deviceScaleFactor: 2 };

/** The page with the double as its worker; records every request. `query` is the page's own. */
async function openPage(options = {}, { browser = 'stock', query = '?backend=webgpu' } = {}) {
  const page = await newPage(browser, { ...DESKTOP, ...options });
  page.asked = [];
  page.on('request', (request) => page.asked.push({ method: request.method(), url: request.url() }));
  await page.route('**/pkg/dist/worker.js', (route) => route.fulfill({ contentType: 'text/javascript', body: "import '/tests/browser/double/worker.js';" }));
  await page.goto(`${await site()}${query}`);
  return page;
}

const ready = (page) => page.waitForSelector('#load:not(:disabled)');
async function loadModel(page) {
  await ready(page);
  await page.click('#load');
  await page.waitForSelector('#generate:not(:disabled)');
}
const statOf = (page, panel, label) => page.locator('.panel').nth(panel).locator('.stats div', { hasText: label }).locator('dd').textContent();

/** Fails on anything that axe objects to, and on anything wider than the screen. */
async function expectAccessible(page, where) {
  await page.evaluate(AXE);
  const { violations } = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ['violations'] }));
  assert.deepEqual(violations.map(({ id, nodes }) => `${where}: ${id}: ${nodes.map((node) => `${node.html} ${node.failureSummary}`).join(' | ')}`), []);
  const { scroll, width } = await page.evaluate(() => ({ scroll: document.documentElement.scrollWidth, width: document.documentElement.clientWidth }));
  assert.ok(scroll <= width, `${where}: the page is ${scroll} pixels wide on a screen of ${width}`);
}

test('page: nothing of the model is downloaded before a click, and nobody else is asked', async () => {
  const page = await openPage();
  await ready(page);
  const origin = new URL(await site()).origin;
  assert.deepEqual(page.asked.filter(({ url }) => new URL(url).origin !== origin), []);
  assert.match(await page.textContent('#model-size'), /\d+ MB to download from this server\. Nothing is downloaded yet/);
  for (const fact of ['To download', 'Memory it takes', 'Largest binding', 'Weights', 'Drafts']) assert.match(await page.textContent('#file-facts'), new RegExp(fact));
  assert.match(await page.textContent('#device-verdict'), /Runs on a GPU in software, slower than on the CPU/);
  for (const fact of ['GPU adapter', '16-bit floats', 'Subgroups', 'Largest binding', 'Main memory']) assert.match(await page.textContent('#device-facts'), new RegExp(fact));
  await loadModel(page);
  assert.deepEqual(page.asked.filter(({ url }) => new URL(url).origin !== origin), []);
  assert.ok(page.asked.some(({ method, url }) => method === 'GET' && url.endsWith(`${DEMO}model.safetensors`)));
  assert.deepEqual(page.errors, []);
});

for (const [name, options] of Object.entries({ desktop: DESKTOP, 'desktop-dark': { ...DESKTOP, colorScheme: 'dark' }, phone: PHONE, 'phone-dark': { ...PHONE, colorScheme: 'dark' } })) {
  test(`page: ${name}: load, stream, compare; accessible at every step`, async () => {
    const page = await openPage(options);
    await ready(page);
    await shoot(page, `${name}-1-before`);
    await expectAccessible(page, 'before');

    // Slow enough to be seen.
    await page.route('**/model.safetensors', async (route) => {
      await new Promise((resolve) => setTimeout(resolve, 300));
      await route.continue();
    });
    await page.click('#load');
    await page.waitForFunction(() => /left/.test(document.getElementById('progress-rate').textContent), null, { polling: 30 });
    assert.match(await page.textContent('#progress-amount'), /^[\d.]+ [kM]?B of 1\d\d MB$/);
    await shoot(page, `${name}-2-loading`);
    await expectAccessible(page, 'loading');
    await page.waitForSelector('#generate:not(:disabled)');

    await page.selectOption('#compare', 'autoregressive');
    await page.click('#generate');
    await page.waitForFunction(() => document.querySelectorAll('.panel .text')[1]?.textContent.length > 20);
    assert.equal(await page.textContent('#generate'), 'Stop');
    await shoot(page, `${name}-3-streaming`);
    await page.waitForSelector('#verdict:not([hidden])');
    await shoot(page, `${name}-4-compared`);
    await expectAccessible(page, 'compared');

    assert.match(await page.textContent('#verdict'), /Texts identical: yes/);
    const [first, second] = await page.locator('.panel .text').allTextContents();
    assert.equal(first, second);
    assert.match(first, /🐋/);
    assert.ok(Number(await statOf(page, 0, 'Tokens / call')) > 1.5);
    assert.equal(await statOf(page, 1, 'Tokens / call'), '1.00');
    assert.match(await statOf(page, 0, 'Guesses right'), /^\d+ %$/);
    assert.ok(Number(await statOf(page, 0, 'Model calls')) < Number(await statOf(page, 1, 'Model calls')));
    assert.ok((await page.locator('.panel').nth(0).locator('mark').count()) > 5);
    assert.equal(await page.locator('.panel').nth(1).locator('mark').count(), 0);
    assert.deepEqual(page.errors, []);
  });
}

test('page: by keyboard alone, and told to screen readers', async () => {
  const page = await openPage();
  await ready(page);
  await page.evaluate(() => {
    globalThis.said = [];
    new MutationObserver(() => said.push(document.getElementById('status').textContent)).observe(document.getElementById('status'), { childList: true, characterData: true, subtree: true });
  });
  const focused = () => page.evaluate(() => document.activeElement.id || document.activeElement.className || document.activeElement.tagName);
  await page.keyboard.press('Tab');
  assert.equal(await focused(), 'skip');
  await page.keyboard.press('Tab');
  assert.equal(await focused(), 'load');
  await page.keyboard.press('Enter');
  await page.waitForSelector('#generate:not(:disabled)');
  assert.equal(await focused(), 'prompt', 'after loading, the prompt has the focus');
  await page.keyboard.press('Control+A');
  await page.keyboard.type('tell me');
  const order = [];
  for (let i = 0; i < 8; i++) {
    await page.keyboard.press('Tab');
    order.push(await focused());
  }
  assert.deepEqual(order, ['chip', 'chip', 'chip', 'chip', 'schedule', 'compare', 'max-tokens', 'generate']);
  await page.keyboard.press('Enter');
  await page.waitForFunction(() => document.querySelector('.panel .text')?.textContent.length > 20);
  await page.keyboard.press('Escape');
  await page.waitForFunction(() => document.getElementById('generate').textContent === 'Generate');
  assert.equal(await focused(), 'generate', 'stopping keeps the focus');
  assert.match(await page.textContent('.panel h3'), /stopped/);
  const stopped = await page.textContent('.panel .text');
  await page.focus('#prompt');
  await page.keyboard.press('Control+Enter');
  await page.waitForFunction(() => /finished|limit/.test(document.querySelector('.panel h3')?.textContent ?? ''));
  assert.ok((await page.textContent('.panel .text')).startsWith(stopped));
  const said = await page.evaluate(() => globalThis.said);
  for (const about of [/Loading/, /ready/, /Generating/, /Stopped/, /Done: \d+ tokens/]) assert.ok(said.some((text) => about.test(text)), `never said ${about}: ${said.join(' / ')}`);
  assert.ok(said.some((text) => /The answer: The lighthouse keeper/.test(text)), 'the answer was not read');
  assert.ok(said.length < 20, 'screen readers are told too much');
  const live = await page.locator('[aria-live], [role=status], [role=alert], [role=log]').evaluateAll((all) => all.map((element) => element.id));
  assert.ok(!live.some((id) => id.startsWith('panel')), 'the stream itself must not be read aloud token by token');
});

test('page: loading can be cancelled and begun again; unloading frees', async () => {
  const page = await openPage();
  await ready(page);
  let slow = true;
  await page.route('**/model.safetensors', async (route) => {
    if (slow) await new Promise((resolve) => setTimeout(resolve, 1000));
    await route.continue().catch(() => {});
  });
  await page.click('#load');
  await page.click('#load-cancel');
  await page.waitForSelector('#load');
  assert.equal(await page.isVisible('#load-error'), false, 'cancelling is no error');
  slow = false;
  await loadModel(page);
  await page.click('#unload');
  await page.waitForSelector('#load');
  assert.equal(await page.isDisabled('#generate'), true);
  await loadModel(page);
});

test('page: whoever works by keyboard is never thrown back to its top', async () => {
  const page = await openPage();
  await ready(page);
  const focused = () => page.evaluate(() => document.activeElement.id || document.activeElement.tagName);
  const focusedIs = (id) => page.waitForFunction((id) => document.activeElement.id === id, id, { timeout: 5000 }).catch(async () => assert.fail(`the focus is at ${await focused()}, not at ${id}`));
  let manner = 'slow';
  await page.route('**/model.safetensors', async (route) => {
    if (manner === 'slow') await new Promise((resolve) => setTimeout(resolve, 1000));
    await (manner === 'gone' ? route.abort() : route.continue()).catch(() => {});
  });
  await page.focus('#load');
  await page.keyboard.press('Enter');
  assert.equal(await focused(), 'load-cancel');
  await page.keyboard.press('Enter');
  await focusedIs('load');
  assert.equal(await page.isEnabled('#load'), true);
  // Failing gives it back too.
  manner = 'gone';
  await page.keyboard.press('Enter');
  await page.waitForSelector('#load-error:not([hidden])');
  await focusedIs('load');
  // Where nothing can be loaded any more, it stays near.
  manner = 'slow';
  await page.keyboard.press('Enter');
  await focusedIs('load-cancel');
  manner = 'gone';
  await page.keyboard.press('Enter');
  await page.waitForSelector('#load-error:not([hidden])');
  await focusedIs('another-title');
  manner = 'quick';
  await page.goto(`${await site()}?backend=webgpu`);
  await loadModel(page);
  await page.focus('#unload');
  await page.keyboard.press('Enter');
  await focusedIs('load');
  await page.waitForSelector('#stored:not([hidden])');
  await page.focus('#stored-list button');
  await page.keyboard.press('Enter');
  await page.waitForSelector('#stored', { state: 'hidden' });
  await focusedIs('load');
  // And it is left alone where it is in use.
  manner = 'slow';
  await page.keyboard.press('Enter');
  await page.focus('#prompt');
  await page.evaluate(() => document.getElementById('load-cancel').click());
  await ready(page);
  assert.equal(await focused(), 'prompt');
  assert.deepEqual(page.errors, []);
});

test('page: a download that falls silent says so, one that failed says what is left, and the button goes on with it', async () => {
  // The real engine: it stores as it goes, and knows afterwards what it has.
  const { [WEIGHTS]: weights, ...rest } = madeUpCheckpoint({ hidden: 512, ffn: 2048, heads: 8, kvHeads: 2, layers: 5, vocab: 4096 });
  const server = await faultServer({ 'some/model': { ...rest, [WEIGHTS]: weights } });
  try {
    const page = await newPage('stock', PHONE);
    await page.goto(`${await site()}?backend=cpu&quantize=q4&model=some/model&hub=${server.url}`);
    await page.waitForSelector('#ask:not([hidden])');
    await page.click('#ask');
    await page.waitForFunction(() => /42 MB to download/.test(document.getElementById('model-size').textContent));
    const size = weights.size;
    const button = (text) => page.waitForFunction((text) => document.getElementById('load').textContent === text, text, { timeout: 20_000 });
    // It breaks in the middle, and then the server refuses.
    let nth = 0;
    server.behave(({ file, range }) => (file !== WEIGHTS || /-65535$/.test(range) ? null : nth++ === 0 ? { cut: size >> 1 } : { status: 403 }));
    assert.equal(await page.textContent('#load'), 'Download and start');
    await page.click('#load');
    await page.waitForSelector('#load-error:not([hidden])');
    assert.match(await page.textContent('#load-error'), /could not be loaded.*permission/);
    await button('Go on with the download');
    assert.match(await page.textContent('#model-size'), /MB are here already/);
    assert.equal(await page.isVisible('#load-error'), true);
    // It falls silent.
    server.behave(({ file }) => (file === WEIGHTS ? { stall: size >> 2 } : null));
    await page.click('#load');
    await page.waitForFunction(() => /waiting for the connection/.test(document.getElementById('progress-rate').textContent), null, { timeout: 20_000 });
    await shoot(page, 'phone-12-silent');
    await expectAccessible(page, 'silent');
    await page.click('#load-cancel');
    await button('Go on with the download');
    server.behave();
    await page.click('#load');
    await page.waitForSelector('#generate:not(:disabled)', { timeout: 30_000 });
    assert.match(await page.textContent('#model-size'), /^Ready in [\d.]+ m?s\. Runs on the CPU\.$/);
    assert.deepEqual(page.errors, []);
  } finally {
    await server.stop();
  }
});

test('page: a program that does not start is said, in a browser without modules too', async () => {
  for (const [route, answer, about] of [
    ['**/pkg/dist/index.js', { status: 404, body: 'not found' }, /could not be fetched from this server/],
    ['**/app.js', { contentType: 'text/javascript', body: 'let x = ;' }, /stopped: .*SyntaxError/],
    ['**/boot.js', { contentType: 'text/javascript', body: `delete HTMLScriptElement.prototype.noModule;\n${readFileSync(path.join(ROOT, 'www/boot.js'), 'utf8')}` }, /too old/],
  ]) {
    const page = await newPage('stock', PHONE);
    await page.route(route, (way) => way.fulfill(answer));
    // A browser without modules runs none.
    if (route.includes('boot')) await page.route('**/app.js', (way) => way.fulfill({ contentType: 'text/javascript', body: '' }));
    await page.goto(await site());
    await page.waitForSelector('#device-help:not([hidden])');
    assert.match(await page.textContent('#device-help'), about);
    assert.equal(await page.textContent('#device-verdict'), 'This page could not start');
    await expectAccessible(page, route);
  }
  // Control: all others start, and then errors are told where they belong.
  const page = await openPage();
  await ready(page);
  await page.evaluate(() => setTimeout(() => { throw new Error('somebody else\'s'); }));
  await page.waitForTimeout(100);
  assert.equal(await page.isVisible('#device-help'), false);
});

test('page: on a phone the answer is in sight while it comes, and so is the button that stops it', async () => {
  const page = await openPage({ ...PHONE, viewport: { width: 390, height: 844 } });
  await loadModel(page);
  await page.emulateMedia({ reducedMotion: 'reduce' }); // at once, then
  await page.tap('#generate');
  const seen = await page.waitForFunction(
    () => document.querySelector('.panel .text')?.textContent.length > 20 && [document.getElementById('generate').textContent, ...['#generate', '.panel .text'].map((part) => document.querySelector(part).getBoundingClientRect().top)],
    null,
    { polling: 20 },
  );
  const [label, ...tops] = await seen.jsonValue();
  assert.equal(label, 'Stop');
  assert.ok(tops[0] >= 0 && tops[0] < 60 && tops[1] < 600, `the button is at ${tops[0]}, the text at ${tops[1]}`);
  await page.screenshot({ path: path.join(SHOTS, 'phone-13-streaming.png') });
  assert.deepEqual(page.errors, []);
});

test('page: the bar is seen where the system has colours of its own', async () => {
  const page = await openPage({ forcedColors: 'active', colorScheme: 'dark', reducedMotion: 'reduce' });
  await ready(page);
  const at = async (value) => {
    await page.evaluate((value) => {
      document.getElementById('loading').hidden = false;
      document.getElementById('progress').value = value;
    }, value);
    return page.locator('#progress').screenshot();
  };
  await at(0); // settles what moves
  const [none, again, some] = [await at(0), await at(0), await at(0.5)];
  assert.ok(none.equals(again), 'what is drawn changes by itself');
  assert.ok(!none.equals(some), 'a half is drawn like nothing');
  assert.deepEqual(page.errors, []);
});

test('page: diagnostics tell device, model and runs, and not the prompt', async () => {
  const page = await openPage({ permissions: ['clipboard-read', 'clipboard-write'] });
  await loadModel(page);
  await page.fill('#prompt', 'a secret thought');
  await page.click('#generate');
  await page.waitForFunction(() => document.getElementById('generate').textContent === 'Generate');
  await page.click('#diagnostics summary');
  await page.click('#copy');
  await page.waitForFunction(() => document.getElementById('copied').textContent !== '');
  const text = await page.evaluate(() => navigator.clipboard.readText());
  const { browser, device, loaded, runs, errors } = JSON.parse(text);
  assert.match(browser, /Chrome/);
  assert.equal(device.webgpu, true);
  assert.equal(loaded.modelType, 'llama');
  assert.equal(runs.length, 1);
  assert.ok(runs[0].calls > 0 && runs[0].timings.total > 0);
  assert.deepEqual(errors, []);
  assert.ok(!/secret|lighthouse/.test(text), 'the prompt or the answer is in the diagnostics');
  await shoot(page, 'desktop-5-diagnostics');
  await expectAccessible(page, 'diagnostics');
});

test('page: no GPU is said honestly, before anything is downloaded', async () => {
  for (const [name, options] of Object.entries({ desktop: DESKTOP, phone: PHONE })) {
    const page = await openPage(options, { browser: 'flagless' });
    await page.waitForSelector('#device-help:not([hidden])');
    assert.match(await page.textContent('#device-help'), /found no GPU.*hardware acceleration/);
    await page.waitForFunction(() => document.getElementById('model-size').textContent !== 'Asking for its size…');
    assert.equal(await page.isDisabled('#load'), true);
    assert.equal(await page.isVisible('#ask'), false);
    await shoot(page, `${name}-6-no-gpu`);
    await expectAccessible(page, 'no GPU');
  }
});

test('page: a GPU that is one is called that', async () => {
  const page = await openPage();
  await page.addInitScript({ path: path.join(ROOT, 'tests/browser/no-fallback.js') });
  await page.reload();
  await ready(page);
  assert.equal(await page.textContent('#device-verdict'), 'Runs on your GPU');
});

test('page: without a GPU it runs on the CPU, and says why', async () => {
  for (const [browser, why] of [['flagless', /found no GPU/], ['stock', /in software only/]]) {
    const page = await openPage({}, { browser, query: '' });
    await ready(page);
    assert.match(await page.textContent('#device-verdict'), /Runs on your CPU/);
    assert.match(await page.textContent('#device-reason'), why);
    await shoot(page, `desktop-9-cpu-${browser}`);
    await expectAccessible(page, 'CPU');
    if (browser === 'flagless') {
      await loadModel(page);
      assert.match(await page.textContent('#model-size'), /Runs on the CPU: This browser has WebGPU, but found no GPU/);
    }
  }
});

test('page: a model that is not there, a panic, a lost device, a refused prompt', async () => {
  const page = await openPage({}, { query: '?model=/nowhere/' });
  await page.waitForSelector('#load-error:not([hidden])');
  assert.match(await page.textContent('#load-error'), /no config\.json/);
  assert.equal(await page.isDisabled('#load'), true);
  await shoot(page, 'desktop-7-no-model');
  await expectAccessible(page, 'no model');

  const broken = await openPage();
  await loadModel(broken);
  for (const [prompt, about, usable] of [
    ['overlong prompt', /9001 tokens/, true],
    ['panic please', /panicked/, false],
    ['lose the device', /device was lost/, false],
  ]) {
    await broken.fill('#prompt', prompt);
    await broken.click('#generate');
    await broken.waitForSelector('#generate-error:not([hidden])');
    await broken.waitForFunction(() => document.getElementById('generate').textContent === 'Generate');
    assert.match(await broken.textContent('#generate-error'), about);
    assert.doesNotMatch(await broken.textContent('#status'), /Generating/);
    assert.equal(await broken.isEnabled('#generate'), usable, prompt);
    if (prompt === 'panic please') {
      await shoot(broken, 'desktop-8-panic');
      await expectAccessible(broken, 'panic');
    }
    if (!usable) await loadModel(broken);
  }
});

test('page: a model from another server is not asked for before the click', async () => {
  const page = await openPage({}, { query: '?model=http://127.0.0.1:9/some-model' });
  await ready(page);
  assert.match(await page.textContent('#model-size'), /From 127\.0\.0\.1:9\. Nothing is asked for/);
  assert.ok(page.asked.every(({ url }) => !url.startsWith('http://127.0.0.1:9/')));
  await page.click('#load');
  await page.waitForSelector('#load-error:not([hidden])');
  assert.match(await page.textContent('#load-error'), /cannot be reached/);

  const hub = await openPage({}, { query: '?model=owner/name&hub=http://127.0.0.1:9' });
  await ready(hub);
  assert.match(await hub.textContent('#model-size'), /From 127\.0\.0\.1:9\. Nothing is asked for/);
  assert.equal(await hub.textContent('#model-name'), 'owner/name');
  assert.ok(hub.asked.every(({ url }) => !url.startsWith('http://127.0.0.1:9/')));
  await hub.click('#ask');
  await hub.waitForSelector('#load-error:not([hidden])');
  assert.match(await hub.textContent('#load-error'), /cannot be reached/);
  assert.equal(await hub.isDisabled('#load'), true);

  // The adapter of an address can be elsewhere too, of a model from here.
  for (const [query, from] of [
    ['?adapter=http://127.0.0.1:9/adapter/', /From this server, and its draft adapter from 127\.0\.0\.1:9\. Nothing is asked for/],
    ['?adapter=owner/name', /From this server, and its draft adapter from the Hugging Face hub\. Nothing is asked for/],
    ['?adapter=owner/name&model=owner/name', /From the Hugging Face hub\. Nothing is asked for/],
  ]) {
    const drafted = await openPage({}, { query });
    await ready(drafted);
    assert.match(await drafted.textContent('#model-size'), from);
    const strange = async () => drafted.asked.filter(({ url }) => new URL(url).origin !== new URL(drafted.url()).origin);
    assert.deepEqual(await strange(), []);
    if (query.includes('owner')) continue;
    await drafted.click('#load');
    await drafted.waitForSelector('#load-error:not([hidden])');
    assert.match(await drafted.textContent('#load-error'), /cannot be reached at http:\/\/127\.0\.0\.1:9/);
  }
  // Control: one beside it needs no leave.
  const beside = await openPage({}, { query: `?adapter=${DEMO}draft_adapter/` });
  await ready(beside);
  assert.match(await beside.textContent('#model-size'), /to download from this server\./);
});

test('page: another model by its address, in the page\'s own address afterwards; from picked files; one that does not fit', async () => {
  const page = await openPage();
  await ready(page);
  await page.click('#another summary');
  await page.fill('#source', '/tests/golden/tiny-llama-tied/');
  await page.selectOption('#quantize', 'q8');
  await expectAccessible(page, 'another model');
  await page.click('#choose');
  await page.waitForFunction(() => document.getElementById('model-name').textContent === 'tiny-llama-tied');
  await ready(page);
  assert.match(await page.textContent('#model-size'), /kB to download/);
  assert.match(await page.textContent('#file-facts'), /8-bit/);
  const query = new URL(page.url()).searchParams;
  assert.deepEqual([query.get('model'), query.get('quantize'), query.get('backend')], ['/tests/golden/tiny-llama-tied/', 'q8', 'webgpu']);
  await loadModel(page);
  await page.setInputFiles('#picked', path.join(ROOT, 'tests/golden/tiny-llama'));
  await page.waitForFunction(() => /On this device/.test(document.getElementById('model-size').textContent));
  await loadModel(page);

  await page.route('**/huge/config.json', (route) => route.fulfill({ json: { model_type: 'llama', vocab_size: 2e9 } }));
  await page.route('**/huge/model.safetensors', (route) => route.fulfill({ body: 'weights' }));
  await page.fill('#source', './huge/');
  await page.click('#choose');
  await page.waitForSelector('#unfit:not([hidden])');
  assert.match(await page.textContent('#unfit'), /does not fit this device: maxBufferSize.*4 TB/);
  assert.equal(await page.isDisabled('#load'), true);
  await shoot(page, 'desktop-10-does-not-fit');
  await expectAccessible(page, 'does not fit');
  assert.deepEqual(page.errors, []);
});

for (const [name, options] of Object.entries({ desktop: DESKTOP, phone: PHONE, 'phone-dark': { ...PHONE, colorScheme: 'dark' } })) {
  test(`page: ${name}: what is stored is listed, needs no download, and can be deleted`, async () => {
    const page = await openPage(options, { query: '?backend=webgpu&model=/tests/golden/tiny-llama-tied/' });
    await loadModel(page);
    await page.goto(`${await site()}?backend=webgpu`);
    await loadModel(page);
    await page.waitForFunction(() => document.querySelectorAll('#stored-list li').length === 2);
    await page.click('#unload');
    await page.waitForFunction(() => /Stored on this device/.test(document.getElementById('model-size').textContent));
    assert.equal(await page.textContent('#load'), 'Start');
    await page.click('#persist');
    await page.waitForFunction(() => document.getElementById('stored-note').textContent !== '');
    await page.click('#another summary');
    await shoot(page, `${name}-11-stored`);
    await expectAccessible(page, 'stored');
    assert.deepEqual(await page.locator('#stored-list .name').allTextContents(), ['SmolLM2-135M-Instruct', 'tiny-llama-tied']);
    await page.click('#stored-list li:first-child button');
    await page.waitForFunction(() => document.querySelectorAll('#stored-list li').length === 1);
    await page.waitForFunction(() => /to download/.test(document.getElementById('model-size').textContent));
    await page.click('#stored-list li:first-child button');
    await page.waitForSelector('#stored', { state: 'hidden' });
    assert.deepEqual(page.errors, []);
  });
}

test('page: a model without a chat template goes on with the text; one that only diffuses blocks has no other schedule', async () => {
  // The real engine.
  const page = await newPage('stock', PHONE);
  await page.goto(`${await site()}?backend=cpu&model=/tests/golden/tiny-sdar-trained/`);
  await loadModel(page);
  assert.equal(await page.inputValue('#schedule'), 'block-diffusion');
  assert.match(await page.textContent('#schedule-meaning'), /runs no other schedule/);
  const enabled = (id) => page.$$eval(`#${id} option:not(:disabled)`, (options) => options.map(({ value }) => value));
  assert.deepEqual([await enabled('schedule'), await enabled('compare')], [['block-diffusion'], ['', 'block-diffusion']]);
  await page.click('#generate');
  await page.waitForFunction(() => /finished|limit/.test(document.querySelector('.panel h3')?.textContent ?? ''));
  assert.ok((await page.textContent('.panel .text')).length > 5);
  assert.equal(await page.isVisible('#load-error'), false);
  await expectAccessible(page, 'block diffusion');
  assert.deepEqual(page.errors, []);

  const plain = await openPage();
  await loadModel(plain);
  assert.ok(!(await plain.$$eval('#schedule option:not(:disabled)', (options) => options.map(({ value }) => value))).includes('block-diffusion'));
});

test('page: one token each is no race; unloading in the middle is no failure', async () => {
  const page = await openPage();
  await loadModel(page);
  await page.selectOption('#compare', 'autoregressive');
  await page.fill('#max-tokens', '1');
  await page.click('#generate');
  await page.waitForSelector('#verdict:not([hidden])');
  assert.match(await page.textContent('#verdict'), /identical: yesPacked took 0 model calls for 1 token, Autoregressive 0\.$/);
  await page.fill('#max-tokens', '96');
  await page.click('#generate');
  // In the page itself: the answer is over in half a second.
  await page.waitForFunction(() => {
    const writes = document.querySelector('.panel .text')?.textContent.length > 20;
    if (writes) document.getElementById('unload').click();
    return writes;
  });
  await ready(page);
  assert.deepEqual(await page.$$eval('.panel .state', (states) => states.map((state) => state.textContent)), ['stopped', 'not started']);
  assert.equal(await page.isVisible('#generate-error'), false);

  // A short answer under a high limit still has bars that can be seen, and both answers have the same scale.
  await loadModel(page);
  await page.fill('#max-tokens', '2048');
  await page.evaluate(() => {
    globalThis.cached = [];
    const post = Worker.prototype.postMessage;
    Worker.prototype.postMessage = function (command, ...rest) {
      if (command.type === 'generate') globalThis.cached.push([command.request.cachePrompt, command.request.schedule]);
      return post.call(this, command, ...rest);
    };
  });
  await page.click('#generate');
  await page.waitForSelector('#verdict:not([hidden])');
  // Both compute the prompt, and the default is left to the engine, which has measured its widths.
  assert.deepEqual(await page.evaluate(() => globalThis.cached), [[false, null], [false, 'autoregressive']]);
  const strips = await page.$$eval('.strip', (strips) => strips.map((strip) => ({ box: strip.getAttribute('viewBox'), used: strip.getBBox().width / strip.viewBox.baseVal.width })));
  assert.equal(strips[0].box, strips[1].box);
  for (const { used } of strips) assert.ok(used > 0.2 && used <= 1, JSON.stringify(strips));
  assert.deepEqual(page.errors, []);
});

test('page: another model is chosen and loaded while the first one is slow to stop', async () => {
  const page = await openPage({}, { query: '?backend=webgpu&model=/tests/golden/tiny-llama-tied/' });
  await ready(page);
  // A worker that is deaf to `stop`, as one in the middle of a long computation is.
  const held = [];
  await page.route('**/tiny-llama-tied/model.safetensors', (route) => held.push(route));
  await page.evaluate(() => {
    const post = Worker.prototype.postMessage;
    Worker.prototype.postMessage = function (command, ...rest) {
      if (command.type !== 'stop') return post.call(this, command, ...rest);
    };
  });
  await page.click('#load');
  await page.waitForSelector('#loading:not([hidden])');
  await page.click('#another summary');
  await page.fill('#source', '/tests/golden/tiny-llama/');
  await page.click('#choose');
  await page.waitForFunction(() => document.getElementById('model-name').textContent === 'tiny-llama');
  await loadModel(page);
  await page.waitForTimeout(2300); // the first load is given up meanwhile
  assert.equal(await page.textContent('#model-name'), 'tiny-llama');
  assert.match(await page.textContent('#model-size'), /Ready in/);
  assert.deepEqual([await page.isVisible('#load-row'), await page.isVisible('#loading'), await page.isEnabled('#generate')], [false, false, true]);
  assert.deepEqual(page.errors, []);
  for (const route of held) await route.abort().catch(() => {});
});

test('page: nonsense in its address is said, and the device is told all the same', async () => {
  for (const [query, about] of [
    ['?backend=abacus', /`backend` must be one of/],
    ['?backend=cpu&context=lots', /`contextLength` must be a whole number/],
    ['?model=javascript:alert(1)', /The source must be an http or https URL/],
    ['?model=owner/name&hub=nonsense:', /`hubUrl` must be an http or https URL/],
    ['?model=/%25E0%25A4%25A/', /^This model cannot be loaded\./],
  ]) {
    const page = await openPage(PHONE, { query });
    await page.waitForSelector('#load-error:not([hidden])');
    assert.match(await page.textContent('#load-error'), about);
    await page.waitForFunction(() => /^(Runs on|No GPU)/.test(document.getElementById('device-verdict').textContent));
    assert.equal(await page.isDisabled('#load'), true, query);
    assert.doesNotMatch((await page.textContent('#device-reason')) ?? '', /URL|safetensors|`/, query);
    await expectAccessible(page, query);
    assert.deepEqual(page.errors, []);
  }
  const empty = await openPage({}, { query: '?model=&backend=webgpu' });
  await ready(empty);
  assert.match(await empty.textContent('#model-name'), /SmolLM2/);
});

test('page: in browsers of 2023 it looks as it should, loads and answers', async () => {
  // The worker is a browser of 2023 as well.
  const page = await newPage('stock', { ...DESKTOP, colorScheme: 'dark' });
  const older = readFileSync(path.join(ROOT, 'tests/browser/older.js'), 'utf8');
  await page.addInitScript(older);
  await page.route('**/pkg/dist/worker.js', (route) => route.fulfill({ contentType: 'text/javascript', body: "import '/tests/browser/older.js'; import '/tests/browser/double/worker.js';" }));
  await page.goto(await site());
  assert.equal(await page.evaluate(() => URL.canParse), undefined);
  await ready(page);
  assert.match(await page.textContent('#device-reason'), /in software only/);
  await loadModel(page);
  await page.click('#generate');
  await page.waitForFunction(() => /finished|limit/.test(document.querySelector('.panel h3')?.textContent ?? ''));
  assert.deepEqual(page.errors, []);
});

test('page: colours are there for light and for dark, in every browser', async () => {
  const css = readFileSync(path.join(ROOT, 'www/style.css'), 'utf8');
  const shown = {};
  for (const colorScheme of ['light', 'dark']) {
    const page = await newPage('stock', { ...DESKTOP, colorScheme });
    await page.goto(await site());
    shown[colorScheme] = await page.evaluate(() => [document.body, document.querySelector('.card'), document.querySelector('.primary')].map((element) => [getComputedStyle(element).backgroundColor, getComputedStyle(element).color]));
  }
  const [light, dark] = [shown.light.flat(), shown.dark.flat()];
  for (const [i, colour] of light.entries()) assert.notEqual(colour, dark[i], `${i}`);
  assert.deepEqual([light[0], dark[0]], ['rgb(246, 246, 249)', 'rgb(17, 18, 24)']);
  // What came to browsers later than Chrome 113, Safari 16.4 and Firefox 120.
  const later = /light-dark\(|:has\(|@starting-style|@scope|@property|@view-transition|anchor\(|\bround\(|from var|field-sizing|subgrid|^\s+&/m;
  assert.doesNotMatch(css, later);
});
