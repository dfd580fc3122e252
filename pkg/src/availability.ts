// The look before the leap: what the device can do, and what a model would take.

import { Client } from './client.js';
import { describeDevice, type DeviceInfo } from './device.js';
import { ForecallError } from './errors.js';
import { loadRequest } from './options.js';
import type { Backend, LoadOptions, ModelSource } from './types.js';

/** Options of {@link availability}: those of `load`, with the same meaning. */
export type AvailabilityOptions = Omit<LoadOptions, 'onProgress' | 'onWarning'>;

/** What {@link availability} found. */
export interface Availability {
  /** The GPU. */
  device: DeviceInfo;
  /** What `load` would run on; `null` if the backend asked for is not there. */
  backend: 'webgpu' | 'cpu' | null;
  /** Whether `load` has a chance. */
  available: boolean;
  /** Why not, or why it would not be on a GPU. */
  reason: string | null;
  /** The limit that fails, by its name in WebGPU or in words; `null` if none does. */
  limit: string | null;
  /** The checkpoint; `null` without a source, and where it cannot be read. */
  model: { type: string; quantization: string; tokenizer: boolean; drafter: boolean } | null;
  /** What `load` would fetch: bytes still to come, bytes stored already, and all files. */
  download: { bytes: number; stored: number; files: { file: string; bytes: number }[] } | null;
  /** Bytes on the device: weights, KV cache, working memory; and on a GPU the largest piece that one shader binds, and of what it is. */
  memory: { weights: number; cache: number; working: number; largestBinding: { bytes: number; of: string } | null } | null;
  /** Bytes that storing would take, and that the browser says it still gives this site (some say the same whatever there is); `null` where it does not say. */
  room: { needed: number; left: number | null } | null;
}

/**
 * Says what this device can do and, given a source, what loading it would take. Reads the checkpoint's small files and the
 * headers of its weights, but no weights. Does not reject for a model that cannot be had: `reason` says so.
 */
export async function availability(source?: ModelSource, options: AvailabilityOptions = {}): Promise<Availability> {
  const checked = loadRequest(source === undefined ? 'any/model' : source, options, 'availability');
  const call = source === undefined ? null : checked;
  const device = await describeDevice();
  const wanted = checked.request.backend;
  const backend = backendOn(device, wanted);
  const software = wanted === 'auto' && device.adapter?.fallback ? 'The browser offers a GPU in software only, which is slower than the CPU itself.' : null;
  const found: Availability = {
    device,
    backend,
    available: backend !== null,
    reason: wanted === 'cpu' ? null : (device.reason ?? software),
    limit: null,
    model: null,
    download: null,
    memory: null,
    room: null,
  };
  if (call === null || backend === null) return found;
  try {
    const { model_type: type, quantization, tokenizer, drafter, backend, fits, reason, limit, download, memory, store } = await new Client(call).preflight();
    found.backend = backend; // the engine decides, and what the page made of the adapter was a guess
    if (backend === 'webgpu') found.reason = null;
    found.model = { type, quantization, tokenizer, drafter };
    found.download = { bytes: download.bytes, stored: download.stored_bytes, files: download.files };
    found.memory = { weights: memory.weights, cache: memory.kv_cache, working: memory.working, largestBinding: memory.largest_binding };
    found.room = { needed: store.bytes_needed, left: store.quota_left };
    if (!fits) Object.assign(found, { available: false, reason, limit });
  } catch (error) {
    if (!(error instanceof ForecallError) || error.code === 'Aborted') throw error;
    Object.assign(found, { available: false, reason: error.message });
  }
  return found;
}

function backendOn(device: DeviceInfo, wanted: Backend): Availability['backend'] {
  if (wanted !== 'cpu' && device.webgpu && (wanted === 'webgpu' || !device.adapter?.fallback)) return 'webgpu';
  return wanted === 'webgpu' ? null : 'cpu';
}
