// Proves that both Chromiums of build.mjs give the WebGPU adapter they promise, and that it computes.
// Prints one line each and exits non-zero when one does not.

import http from 'node:http';
import { chromium } from 'playwright-core';
import { lavapipeChromium, stockChromium } from './build.mjs';

/** What each adapter must be. `shaderF16: null` where the kernels work with either. */
const EXPECTED = {
  swiftshader: { launch: stockChromium, subgroupMinSize: 4, shaderF16: false },
  lavapipe: { launch: lavapipeChromium, subgroupMinSize: 8, shaderF16: true },
};

/** Runs in the page: describes the adapter and sums the numbers 1 to 64 with subgroup additions, in f16 where it can. */
async function examine() {
  const adapter = await navigator.gpu?.requestAdapter();
  if (!adapter) return { error: 'no WebGPU adapter' };
  const f16 = adapter.features.has('shader-f16');
  const device = await adapter.requestDevice({ requiredFeatures: f16 ? ['shader-f16', 'subgroups'] : ['subgroups'] });
  const number = f16 ? 'f16' : 'f32';
  const code = `${f16 ? 'enable f16;' : ''} enable subgroups;
    @group(0) @binding(0) var<storage, read_write> sums: array<f32>;
    @compute @workgroup_size(64) fn main(@builtin(local_invocation_index) i: u32) {
      sums[i] = f32(subgroupAdd(${number}(i + 1u)));
    }`;
  const pipeline = await device.createComputePipelineAsync({ layout: 'auto', compute: { module: device.createShaderModule({ code }) } });
  const sums = device.createBuffer({ size: 256, usage: GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC });
  const readback = device.createBuffer({ size: 256, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
  const encoder = device.createCommandEncoder();
  const pass = encoder.beginComputePass();
  pass.setPipeline(pipeline);
  pass.setBindGroup(0, device.createBindGroup({ layout: pipeline.getBindGroupLayout(0), entries: [{ binding: 0, resource: { buffer: sums } }] }));
  pass.dispatchWorkgroups(1);
  pass.end();
  encoder.copyBufferToBuffer(sums, 0, readback, 0, 256);
  device.queue.submit([encoder.finish()]);
  await readback.mapAsync(GPUMapMode.READ);
  const values = [...new Float32Array(readback.getMappedRange())];
  const { subgroupMinSize, subgroupMaxSize, vendor, architecture } = adapter.info;
  return { vendor, architecture, subgroupMinSize, subgroupMaxSize, shaderF16: f16, firstSubgroupSum: values[0], lastSubgroupSum: values[63] };
}

/** Sum of the numbers of one subgroup that starts at `from`. */
const sum = (from, size) => size * from + (size * (size - 1)) / 2;

export async function probe(name) {
  const expected = EXPECTED[name];
  // WebGPU needs a secure context; a page of this machine is one.
  const server = http.createServer((_, response) => response.setHeader('content-type', 'text/html').end('<!doctype html><title>probe</title>'));
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
  const browser = await chromium.launch({ headless: true, ...expected.launch() });
  try {
    const page = await browser.newPage();
    await page.goto(`http://127.0.0.1:${server.address().port}/`);
    const found = await page.evaluate(examine);
    const size = expected.subgroupMinSize;
    const wanted = { subgroupMinSize: size, shaderF16: expected.shaderF16, firstSubgroupSum: sum(1, size), lastSubgroupSum: sum(65 - size, size) };
    const wrong = Object.entries(wanted).filter(([key, value]) => found[key] !== value);
    return { name, found, wrong: wrong.map(([key, value]) => `${key} should be ${value}, is ${found[key]}`) };
  } finally {
    await browser.close();
    server.close();
  }
}

let failed = 0;
for (const name of Object.keys(EXPECTED)) {
  const { found, wrong } = await probe(name);
  if (wrong.length || found.error) failed++;
  console.log(`${name}: ${found.error ?? (wrong.length ? wrong.join('; ') : 'ok')} ${JSON.stringify(found)}`);
}
process.exit(failed ? 1 : 0);
