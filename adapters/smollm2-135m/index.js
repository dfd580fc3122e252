/** The adapter's files, each at its own address, in a form that bundlers see: what `load` takes as its `adapter`. */
export const adapterFiles = {
  'adapter_config.json': new URL('./adapter_config.json', import.meta.url).href,
  'adapter_model.safetensors': new URL('./adapter_model.safetensors', import.meta.url).href,
};
