// What this browser's WebGPU can do, and the one thing wgpu does not ask it for.

import type { WebAdapter } from './engine.js';
import { ForecallError } from './errors.js';
import type { Backend } from './types.js';

/** The GPU as a page may see it. */
export interface DeviceInfo {
  /** Whether a WebGPU adapter was given. */
  webgpu: boolean;
  /** Why not, and what may help. `null` where there is one. */
  reason: string | null;
  /** What the adapter says of itself; browsers keep some of it back. */
  adapter: { vendor: string; architecture: string; device: string; description: string; fallback: boolean } | null;
  /** 16-bit floats in shaders. Without them what is stored in 16 bits is unpacked by hand: as small, a little slower. */
  shaderF16: boolean;
  subgroups: boolean;
  subgroupMinSize: number | null;
  subgroupMaxSize: number | null;
  /** In bytes and threads. */
  limits: {
    maxBufferSize: number;
    maxStorageBufferBindingSize: number;
    maxStorageBuffersPerShaderStage: number;
    maxComputeWorkgroupStorageSize: number;
    maxComputeInvocationsPerWorkgroup: number;
  } | null;
  /** The device's main memory in GiB, rounded by the browser; `null` where it does not say. */
  memoryGiB: number | null;
}

const NO_API = 'This browser has no WebGPU here. Use a recent Chrome, Edge, Safari or Firefox, over https or localhost.';
const NO_ADAPTER =
  'This browser has WebGPU, but found no GPU it may use. Check that hardware acceleration is on, that the graphics driver is up to date, and chrome://gpu or about:support for the reason.';

async function requestAdapter(): Promise<{ adapter: GPUAdapter } | { reason: string }> {
  const gpu = typeof navigator === 'undefined' ? undefined : (navigator as Navigator & { gpu?: GPU }).gpu;
  if (!gpu) return { reason: NO_API };
  try {
    const adapter = await gpu.requestAdapter({ powerPreference: 'high-performance' });
    return adapter ? { adapter } : { reason: NO_ADAPTER };
  } catch (error) {
    return { reason: `${NO_ADAPTER} The browser says: ${String(error)}` };
  }
}

/** What an adapter says of itself, as far as it does. */
type AdapterInfo = Partial<GPUAdapterInfo>;

/** Chrome from 113 to 126 tells it when it is asked only. */
async function infoOf(adapter: GPUAdapter): Promise<AdapterInfo> {
  const older = adapter as { info?: GPUAdapterInfo; requestAdapterInfo?: () => Promise<GPUAdapterInfo> };
  try {
    return older.info ?? (await older.requestAdapterInfo?.()) ?? {};
  } catch {
    return {};
  }
}

/** Describes the GPU. Never rejects; asks for no device and downloads nothing. */
export async function describeDevice(): Promise<DeviceInfo> {
  const memory = typeof navigator === 'undefined' ? undefined : (navigator as Navigator & { deviceMemory?: number }).deviceMemory;
  const found = await requestAdapter();
  if ('reason' in found) {
    return {
      webgpu: false, reason: found.reason, adapter: null, shaderF16: false, subgroups: false, subgroupMinSize: null, subgroupMaxSize: null, limits: null, memoryGiB: memory ?? null,
    };
  }
  const { features, limits } = found.adapter;
  const info = await infoOf(found.adapter);
  const { vendor = '', architecture = '', device = '', description = '' } = info;
  return {
    webgpu: true,
    reason: null,
    adapter: { vendor, architecture, device, description, fallback: isFallback(found.adapter, info) },
    shaderF16: features.has('shader-f16'),
    subgroups: features.has('subgroups'),
    subgroupMinSize: info.subgroupMinSize ?? null,
    subgroupMaxSize: info.subgroupMaxSize ?? null,
    limits: {
      maxBufferSize: limits.maxBufferSize,
      maxStorageBufferBindingSize: limits.maxStorageBufferBindingSize,
      maxStorageBuffersPerShaderStage: limits.maxStorageBuffersPerShaderStage,
      maxComputeWorkgroupStorageSize: limits.maxComputeWorkgroupStorageSize,
      maxComputeInvocationsPerWorkgroup: limits.maxComputeInvocationsPerWorkgroup,
    },
    memoryGiB: memory ?? null,
  };
}

/** The flag moved from the adapter to its info; browsers have one or the other. */
function isFallback(adapter: GPUAdapter, info: AdapterInfo): boolean {
  return info.isFallbackAdapter ?? (adapter as { isFallbackAdapter?: boolean }).isFallbackAdapter ?? false;
}

/** What the engine is told to run on. */
export interface BackendChoice {
  /** `auto` leaves it to the engine. */
  backend: Backend;
  /** Why, where the page knows better than the engine. */
  reason: string | null;
  adapter: WebAdapter;
  /** What the adapter can give; `null` where there is none. */
  limits: Record<string, number> | null;
}

/**
 * Looks for an adapter. Where there is one, every device made afterwards in this worker has subgroups if its adapter does:
 * wgpu does not know the feature on the web and would never ask for it. It does ask for every limit that it knows, which
 * older browsers refuse, and for `info`, which they lack. `onLost` hears of a device that goes away by itself.
 */
export async function chooseBackend(wanted: Backend, onLost: (message: string) => void): Promise<BackendChoice> {
  const none: BackendChoice = { backend: 'cpu', reason: null, adapter: { subgroups: false, subgroupSizes: [0, 0], software: false }, limits: null };
  if (wanted === 'cpu') return none;
  const found = await requestAdapter();
  if ('reason' in found) {
    if (wanted === 'webgpu') throw new ForecallError('Unsupported', found.reason);
    return { ...none, reason: found.reason };
  }
  const { adapter } = found;
  const info = await infoOf(adapter);
  const prototype = Object.getPrototypeOf(adapter) as GPUAdapter;
  if (!adapter.info) Object.defineProperty(prototype, 'info', { configurable: true, value: { description: info.description ?? '', isFallbackAdapter: isFallback(adapter, info) } });
  const original = prototype.requestDevice;
  prototype.requestDevice = async function (this: GPUAdapter, descriptor: GPUDeviceDescriptor = {}) {
    const features = new Set(descriptor.requiredFeatures ?? []);
    if (this.features.has('subgroups')) features.add('subgroups');
    const requiredLimits = Object.fromEntries(Object.entries(descriptor.requiredLimits ?? {}).filter(([name]) => name in this.limits));
    const device = await original.call(this, { ...descriptor, requiredFeatures: [...features], requiredLimits });
    void device.lost.then(({ reason, message }) => {
      if (reason !== 'destroyed') onLost(message);
    });
    return device;
  };
  const { subgroupMinSize: least = 0, subgroupMaxSize: most = 0 } = info;
  return { backend: wanted, reason: null, adapter: { subgroups: adapter.features.has('subgroups'), subgroupSizes: [least, most], software: isFallback(adapter, info) }, limits: numbersOf(adapter.limits) };
}

/** The limits as plain data: they are getters of the object's prototype. */
function numbersOf(limits: GPUSupportedLimits): Record<string, number> {
  const numbers: Record<string, number> = {};
  for (const name in limits) {
    const value = (limits as unknown as Record<string, unknown>)[name];
    if (typeof value === 'number') numbers[name] = value;
  }
  return numbers;
}
