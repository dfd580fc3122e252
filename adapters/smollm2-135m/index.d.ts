/** The adapter's files, each at its own address, in a form that bundlers see: what `load` takes as its `adapter`. */
export declare const adapterFiles: Readonly<Record<'adapter_config.json' | 'adapter_model.safetensors', string>>;
