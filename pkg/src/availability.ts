// The look before the leap: what the device can do, and what a model would cost to fetch.

import { sizeWithoutBody } from './bytes.js';
import { describeDevice, type DeviceInfo } from './device.js';
import { ForecallError } from './errors.js';
import { folderUrl } from './options.js';
import type { Backend } from './types.js';

/** Options of {@link availability}. */
export interface AvailabilityOptions {
  /** As in `load`. */
  adapter?: string | URL | undefined;
  /** As in `load`. */
  backend?: Backend | undefined;
  /** As in `load`. */
  headers?: Record<string, string> | undefined;
}

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
  /** Files that `load` would fetch, with their bytes (`null` where the server does not say). Empty without a source. */
  files: { file: string; bytes: number | null }[];
  /** Bytes of these files; `null` if one is unknown. */
  bytes: number | null;
}

const TEXT_FILES = ['config.json', 'generation_config.json', 'tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja'];
const WEIGHTS = 'model.safetensors';
const INDEX = 'model.safetensors.index.json';
const ADAPTER_FILES = ['adapter_config.json', 'adapter_model.safetensors'] as const;
const ADAPTER_FOLDERS = ['linear_spec_lora/', 'draft_adapter/'];

/**
 * Says what this device can do and, given a source, what loading it would fetch. Sizes are asked for without bodies;
 * only a sharded checkpoint's index is read. Does not reject for a model that cannot be had: `reason` says so.
 */
export async function availability(source?: string | URL, options: AvailabilityOptions = {}): Promise<Availability> {
  const device = await describeDevice();
  const { backend: wanted = 'auto' } = options;
  const onGpu = wanted !== 'cpu' && device.webgpu && (wanted === 'webgpu' || !device.adapter?.fallback);
  const backend = onGpu ? 'webgpu' : wanted === 'webgpu' ? null : 'cpu';
  const software = wanted === 'auto' && device.adapter?.fallback ? 'The browser offers a GPU in software only, which is slower than the CPU itself.' : null;
  const found: Availability = { device, backend, available: backend !== null, reason: wanted === 'cpu' ? null : (device.reason ?? software), files: [], bytes: null };
  if (source === undefined) return found;
  const headers = { ...options.headers };
  try {
    const base = folderUrl('the source', source);
    const sizes = (folder: string, prefix: string, names: readonly string[]) =>
      Promise.all(names.map(async (name) => ({ file: prefix + name, bytes: await optional(sizeWithoutBody(folder, name, headers)) })));
    const present = (files: { file: string; bytes: number | null | undefined }[]) => {
      for (const { file, bytes } of files) if (bytes !== undefined) found.files.push({ file, bytes });
    };

    const [config, ...texts] = await sizes(base, '', TEXT_FILES);
    if (config?.bytes === undefined) throw new ForecallError('Fetch', `there is no config.json at ${base}, so this is no checkpoint folder. Check the address of the model.`, { missing: true });
    present([config, ...texts]);

    const [weights] = await sizes(base, '', [WEIGHTS]);
    if (weights?.bytes !== undefined) present([weights]);
    else present(await sizes(base, '', await shards(base, headers)));

    if (options.adapter === undefined) {
      for (const folder of ADAPTER_FOLDERS) {
        const [config] = await sizes(base, '', [`${folder}${ADAPTER_FILES[0]}`]);
        if (config?.bytes === undefined) continue;
        present([config, ...(await sizes(base, '', [`${folder}${ADAPTER_FILES[1]}`]))]);
        break;
      }
    } else if (options.adapter !== 'none') present(await sizes(folderUrl('the adapter', options.adapter), 'adapter/', ADAPTER_FILES));

    found.bytes = found.files.reduce<number | null>((sum, { bytes }) => (sum === null || bytes === null ? null : sum + bytes), 0);
  } catch (error) {
    if (!(error instanceof ForecallError)) throw error;
    found.available = false;
    found.reason = [backend === null ? device.reason : null, error.message].filter(Boolean).join(' ');
  }
  return found;
}

/** `undefined` for a file that is not there. */
async function optional<T>(size: Promise<T>): Promise<T | undefined> {
  try {
    return await size;
  } catch (error) {
    if (error instanceof ForecallError && error.missing) return undefined;
    throw error;
  }
}

/** Names of a sharded checkpoint's weight files. */
async function shards(base: string, headers: Record<string, string>): Promise<string[]> {
  const response = await fetch(new URL(INDEX, base), { headers, referrerPolicy: 'no-referrer' }).catch(() => null);
  const index = response?.ok ? ((await response.json().catch(() => null)) as { weight_map?: Record<string, unknown> } | null) : null;
  const names = Object.values(index?.weight_map ?? {}).filter((name): name is string => typeof name === 'string');
  if (names.length === 0) throw new ForecallError('Fetch', `there is neither ${WEIGHTS} nor a readable ${INDEX} at ${base}.`, { missing: true });
  return [...new Set(names)];
}
