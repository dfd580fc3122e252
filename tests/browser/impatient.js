// Silence gets long sooner.
const { setTimeout: wait } = globalThis;
globalThis.setTimeout = (run, ms, ...rest) => wait(run, ms >= 20_000 ? ms / 20 : ms, ...rest);
