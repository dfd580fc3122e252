/** Address of this package's folder, with its closing slash: `adapter_config.json` and `adapter_model.safetensors` lie in it. */
export declare const adapterUrl: string;
