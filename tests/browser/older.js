// What browsers of 2023 lack of what this one has: Chrome 113, Safari 16.4 and Firefox 120, each for its part. To be run
// before anything else, in the page and in the worker.

const drop = (owner, ...names) => names.forEach((name) => owner && Reflect.deleteProperty(owner, name));
drop(URL, 'canParse', 'parse');
drop(Promise, 'withResolvers', 'try');
drop(Array, 'fromAsync');
drop(Object, 'groupBy');
drop(Map, 'groupBy');
drop(Set.prototype, 'union', 'intersection', 'difference', 'symmetricDifference', 'isSubsetOf', 'isSupersetOf', 'isDisjointFrom');
drop(RegExp, 'escape');
drop(AbortSignal, 'any');
drop(ArrayBuffer.prototype, 'transfer', 'transferToFixedLength', 'detached');
drop(Uint8Array, 'fromBase64', 'fromHex');
drop(Uint8Array.prototype, 'toBase64', 'toHex');
drop(ReadableStream, 'from');
drop(ReadableStream.prototype, Symbol.asyncIterator, 'values');
drop(Response.prototype, 'bytes');
drop(Blob.prototype, 'bytes');
drop(globalThis, 'Iterator', 'Float16Array', 'DisposableStack', 'AsyncDisposableStack', 'SuppressedError');
drop(Object.getPrototypeOf(Object.getPrototypeOf([].values())), 'map', 'filter', 'take', 'drop', 'flatMap', 'reduce', 'toArray', 'forEach', 'some', 'every', 'find');
drop((globalThis.Navigator ?? globalThis.WorkerNavigator).prototype, 'deviceMemory');

if (globalThis.GPUAdapter) {
  drop(globalThis.GPU.prototype, 'wgslLanguageFeatures');
  drop(GPUAdapter.prototype, 'info');
  drop(GPUSupportedLimits.prototype, 'maxBindGroupsPlusVertexBuffers');
  // The flag was the adapter's own.
  Object.defineProperty(GPUAdapter.prototype, 'isFallbackAdapter', { configurable: true, get: () => true });
  const { requestDevice } = GPUAdapter.prototype;
  GPUAdapter.prototype.requestDevice = async function (descriptor = {}) {
    for (const name of Object.keys(descriptor.requiredLimits ?? {})) {
      if (!(name in this.limits)) throw new DOMException(`The limit name "${name}" is not recognized.`, 'OperationError');
    }
    return requestDevice.call(this, descriptor);
  };
}
