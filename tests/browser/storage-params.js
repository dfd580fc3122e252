// For Chromium on lavapipe alone. Mesa 22.3 compiles a kernel anew, at every dispatch, for the values of the uniforms its
// loops depend on, and never frees the old ones: ten times slower, and gigabytes in a minute. (Natively it does so too
// rarely to matter.) Parameters that come in storage buffers are left alone, so that is what they become here; the shaders
// are otherwise as they ship. The unchanged ones meet the browser's compiler on SwiftShader.

const STORAGE = 0x80;
const UNIFORM = 0x40;
const { createShaderModule, createBindGroupLayout, createBuffer } = GPUDevice.prototype;

Object.assign(GPUDevice.prototype, {
  createShaderModule(descriptor) {
    return createShaderModule.call(this, { ...descriptor, code: descriptor.code.replaceAll('var<uniform>', 'var<storage, read>') });
  },
  createBindGroupLayout(descriptor) {
    const entries = [...descriptor.entries].map((entry) =>
      entry.buffer?.type === 'uniform' ? { ...entry, buffer: { ...entry.buffer, type: 'read-only-storage' } } : entry,
    );
    return createBindGroupLayout.call(this, { ...descriptor, entries });
  },
  createBuffer({ label, size, usage, mappedAtCreation }) {
    return createBuffer.call(this, { label, size, usage: usage & UNIFORM ? usage | STORAGE : usage, mappedAtCreation });
  },
});
