// The two Chromiums that the browser tests drive, as launch options for playwright-core.
//
//   stockChromium()     the installed package as it is: WebGPU on SwiftShader (32-bit floats only, subgroups of 4, slow)
//   lavapipeChromium()  the same browser with Mesa's lavapipe under it (16-bit floats, subgroups of 8, 9 to 35 times
//                       faster): so that the f16 and subgroup kernels meet the browser's own shader compiler
//
// The second is a copy of the package's folder under target/, made of hard links where the file system allows, in which
// the driver that Chromium opens as SwiftShader is our shim (shim.c). The installed package is never written to. Both
// adapters call themselves SwiftShader: `subgroupMinSize` (4 or 8) and `shader-f16` tell them apart.
//
// Run as a script it builds the second and prints its path.

import { execFileSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import fs from 'node:fs';
import path from 'node:path';
import { fileURLToPath } from 'node:url';

const HERE = path.dirname(fileURLToPath(import.meta.url));
const ROOT = path.resolve(HERE, '..', '..');
const OUT = path.join(ROOT, 'target', 'lavapipe-chromium');
const SHIM_SOURCE = path.join(HERE, 'shim.c');

const SWIFTSHADER = 'libvk_swiftshader.so';
const SWIFTSHADER_ICD = 'vk_swiftshader_icd.json';
const REAL_SWIFTSHADER = 'libvk_swiftshader_real.so';

/** Flags for both: WebGPU on a software adapter, and a browser that makes no connections of its own. */
const ARGS = [
  '--no-sandbox',
  '--disable-quic',
  '--no-first-run',
  '--disable-background-networking',
  '--disable-component-update',
  '--disable-sync',
  '--enable-unsafe-webgpu',
];

/** Folder of the package's real binary (its launcher on PATH is a script). CHROMIUM_DIR overrides it. */
function chromiumDir() {
  const candidates = process.env.CHROMIUM_DIR ? [process.env.CHROMIUM_DIR] : ['/usr/lib/chromium', '/usr/lib/chromium-browser'];
  const found = candidates.find((dir) => ['chromium', SWIFTSHADER, SWIFTSHADER_ICD].every((f) => fs.existsSync(path.join(dir, f))));
  if (found) return found;
  throw new Error(
    `no Chromium with SwiftShader in ${candidates.join(' or ')}: install Debian's package "chromium", or name the folder of its binary in CHROMIUM_DIR`,
  );
}

/** Path of Mesa's lavapipe driver, read from the manifest that the Vulkan loader would read. */
function lavapipeLibrary() {
  const folders = ['/usr/share/vulkan/icd.d', '/usr/local/share/vulkan/icd.d', '/etc/vulkan/icd.d'];
  for (const folder of folders) {
    if (!fs.existsSync(folder)) continue;
    const manifest = fs.readdirSync(folder).find((name) => /^lvp_icd.*\.json$/.test(name));
    if (!manifest) continue;
    const file = path.join(folder, manifest);
    const library = JSON.parse(fs.readFileSync(file, 'utf8'))?.ICD?.library_path;
    if (typeof library !== 'string') throw new Error(`${file} names no library_path`);
    return library;
  }
  throw new Error(`no lavapipe driver in ${folders.join(', ')}: install Debian's package "mesa-vulkan-drivers"`);
}

/** Changes when the installed browser, the driver or the shim does: the copy is then made anew. */
function fingerprint(dir, library) {
  const hash = createHash('sha256');
  for (const name of ['chromium', SWIFTSHADER, SWIFTSHADER_ICD]) {
    const { size, mtimeMs } = fs.statSync(path.join(dir, name));
    hash.update(`${dir}/${name} ${size} ${mtimeMs}\n`);
  }
  hash.update(library).update(fs.readFileSync(SHIM_SOURCE)).update(fs.readFileSync(fileURLToPath(import.meta.url)));
  return hash.digest('hex');
}

/** Copies a folder by hard links. Where they are refused (other file system, files of another user) it copies bytes. */
function linkTree(from, to) {
  fs.mkdirSync(to, { recursive: true });
  for (const entry of fs.readdirSync(from, { withFileTypes: true })) {
    const [source, target] = [path.join(from, entry.name), path.join(to, entry.name)];
    if (entry.isDirectory()) linkTree(source, target);
    else if (entry.isSymbolicLink()) fs.symlinkSync(fs.readlinkSync(source), target);
    else {
      try {
        fs.linkSync(source, target);
      } catch (error) {
        if (!['EXDEV', 'EPERM', 'EACCES', 'EMLINK'].includes(error.code)) throw error;
        fs.copyFileSync(source, target, fs.constants.COPYFILE_FICLONE);
      }
    }
  }
}

function compileShim(library, out) {
  const args = ['-std=c11', '-O2', '-Wall', '-Wextra', '-Werror', '-shared', '-fPIC', '-fvisibility=hidden', '-Wl,-Bsymbolic'];
  try {
    execFileSync('gcc', [...args, `-DLAVAPIPE_LIBRARY="${library}"`, '-o', out, SHIM_SOURCE, '-ldl', '-pthread'], {
      stdio: ['ignore', 'pipe', 'pipe'],
      encoding: 'utf8',
    });
  } catch (error) {
    if (error.code === 'ENOENT') throw new Error('gcc is missing: install Debian\'s package "gcc"');
    throw new Error(`the lavapipe shim does not compile (are the packages "libc6-dev" and "libvulkan-dev" installed?):\n${error.stderr ?? error}`);
  }
}

/** Makes the copied browser folder if it is missing or stale, and returns the path of its binary. */
export function buildLavapipeChromium() {
  const dir = chromiumDir();
  const library = lavapipeLibrary();
  const wanted = fingerprint(dir, library);
  const stamp = path.join(OUT, 'forecall-stamp');
  const executable = path.join(OUT, 'chromium');
  const isCurrent = () => fs.existsSync(stamp) && fs.readFileSync(stamp, 'utf8') === wanted;
  if (isCurrent()) return executable;

  // Built beside its place and then moved there, so that an interrupted build is never taken for a finished one.
  const building = `${OUT}.${process.pid}.tmp`;
  fs.rmSync(building, { recursive: true, force: true });
  try {
    linkTree(dir, building);
    const file = (name) => path.join(building, name);
    // Removed first: writing to a hard link would write to the installed package.
    fs.rmSync(file(SWIFTSHADER));
    fs.rmSync(file(SWIFTSHADER_ICD));
    // Chromium's compositor still finds the real SwiftShader, through the manifest; WebGPU opens the library by name.
    fs.copyFileSync(path.join(dir, SWIFTSHADER), file(REAL_SWIFTSHADER));
    const manifest = fs.readFileSync(path.join(dir, SWIFTSHADER_ICD), 'utf8');
    fs.writeFileSync(file(SWIFTSHADER_ICD), manifest.replace(SWIFTSHADER, REAL_SWIFTSHADER));
    compileShim(library, file(SWIFTSHADER));
    fs.writeFileSync(file('forecall-stamp'), wanted);
    fs.rmSync(OUT, { recursive: true, force: true });
    try {
      fs.renameSync(building, OUT);
    } catch (error) {
      if (!isCurrent()) throw error; // another process was faster, with the same result
    }
  } finally {
    fs.rmSync(building, { recursive: true, force: true });
  }
  return executable;
}

/** Launch options for Chromium on lavapipe. Builds it at the first use. */
export function lavapipeChromium() {
  return { executablePath: buildLavapipeChromium(), args: [...ARGS], env: { ...process.env } };
}

/** Launch options for the installed Chromium, whose WebGPU adapter is SwiftShader. */
export function stockChromium() {
  return { executablePath: path.join(chromiumDir(), 'chromium'), args: [...ARGS], env: { ...process.env } };
}

if (process.argv[1] && fs.realpathSync(process.argv[1]) === fileURLToPath(import.meta.url)) {
  console.log(buildLavapipeChromium());
}
