// Brings up the wasm module that `npm run build` puts beside this package's scripts.

import type { Engine } from './engine.js';
import { ForecallError } from './errors.js';
// @ts-ignore: made by wasm-bindgen; `WasmModule` below is what is used of it.
import * as generated from '../wasm/forecall.js';

interface WasmModule {
  default(options: { module_or_path: URL | string | Response }): Promise<unknown>;
}

/** Fetches and compiles the module, from beside this script unless told otherwise. */
export async function startEngine(wasmUrl: string | null): Promise<Engine> {
  const module = generated as unknown as WasmModule & Engine;
  const url = wasmUrl ?? new URL('../wasm/forecall_bg.wasm', import.meta.url);
  try {
    await module.default({ module_or_path: url });
  } catch (cause) {
    throw new ForecallError('Fetch', `the wasm module could not be loaded from ${url}: ${String(cause)}. If a bundler moved it, pass its address as \`wasmUrl\`.`, { url: String(url) }, { cause });
  }
  return module;
}
