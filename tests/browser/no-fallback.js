Object.defineProperty(GPUAdapterInfo.prototype, 'isFallbackAdapter', { get: () => false });
