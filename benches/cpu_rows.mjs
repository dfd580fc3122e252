// What a call costs on the CPU against its rows, in WebAssembly, one thread: `node benches/cpu_rows.mjs`.
// Builds benches/cpu_rows.rs for wasm32 with SIMD128 and times its exports; prints the same table as the native bench.

import { spawnSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";

const CACHED = 256;
// Milliseconds per width.
const budget = 1000 * Number(process.env.SECONDS ?? 1);

function build() {
    const args = ["build", "--profile", "wasm", "--target", "wasm32-unknown-unknown", "--bench", "cpu_rows"];
    // Flags as the build tool has them for the module that ships.
    const options = {
        cwd: fileURLToPath(new URL("..", import.meta.url)),
        env: { ...process.env, RUSTFLAGS: `${process.env.RUSTFLAGS ?? ""} -C target-feature=+simd128 -C llvm-args=-inline-threshold=10` },
        stdio: ["ignore", "pipe", "inherit"],
        maxBuffer: 1 << 28,
    };
    const { status, stdout } = spawnSync("cargo", [...args, "--message-format=json-render-diagnostics"], options);
    if (status !== 0) throw new Error(`cargo build failed with status ${status}`);
    const messages = stdout.toString().split("\n").filter(Boolean).map((line) => JSON.parse(line));
    const made = messages.flatMap((m) => (m.target?.name === "cpu_rows" ? m.filenames : [])).find((f) => f.endsWith(".wasm"));
    if (!made) throw new Error("cargo built no cpu_rows.wasm");
    return made;
}

const module = await WebAssembly.compile(readFileSync(process.argv[2] ?? build()));
// The crate's browser bindings may leave imports behind; none is called here.
const imports = {};
for (const { module: from, name, kind } of WebAssembly.Module.imports(module)) {
    if (kind !== "function") throw new Error(`unexpected import ${from}.${name} (${kind})`);
    (imports[from] ??= {})[name] = () => {
        throw new Error(`${from}.${name} was called`);
    };
}
const { exports } = await WebAssembly.instantiate(module, imports);

const bytes = exports.setup();
if (!(bytes > 0)) throw new Error("the model could not be made");

function time(...args) {
    const start = performance.now();
    if (exports.run(...args) !== 1) throw new Error(`a call of ${args} failed`);
    return performance.now() - start;
}

console.log(`WebAssembly, one thread; ${(bytes / 1e6).toFixed(1)} MB of weights`);
const prefill = Math.min(time(1, 0, CACHED, 1), time(1, 0, CACHED, 1), time(1, 0, CACHED, 1));
console.log(`prefill of ${CACHED}: ${prefill.toFixed(1)} ms, ${((CACHED / prefill) * 1e3).toFixed(0)} tokens/s`);
console.log("rows | ms per call | against 1 row | GB/s | rows/s");
let one;
for (const rows of [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]) {
    // The fastest of as many calls as fit into the budget: other work on the machine only ever slows one down.
    let best = Infinity;
    const begin = performance.now();
    for (let n = 0; n < 5 || performance.now() - begin < budget; n++) best = Math.min(best, time(0, CACHED, rows, rows));
    one ??= best;
    const cells = [
        `${rows}`.padStart(4),
        best.toFixed(2).padStart(11),
        (best / one).toFixed(2).padStart(13),
        (bytes / best / 1e6).toFixed(1).padStart(4),
        ((rows / best) * 1e3).toFixed(0),
    ];
    console.log(cells.join(" | "));
}
const memory = exports.memory.buffer.byteLength;
console.log(`memory: ${(memory / 1e6).toFixed(0)} MB with a context of 2048`);
