// Keeps the WebAssembly memories made in this worker, and tells on the channel "wasm-memory" how many bytes they have.
const memories = [];
for (const name of ['instantiate', 'instantiateStreaming']) {
  const real = WebAssembly[name];
  WebAssembly[name] = async (...given) => {
    const made = await real.apply(WebAssembly, given);
    const { memory } = (made.instance ?? made).exports;
    if (memory) memories.push(memory);
    return made;
  };
}
const channel = new BroadcastChannel('wasm-memory');
channel.onmessage = ({ data }) => {
  if (data === 'ask') channel.postMessage(memories.map((memory) => memory.buffer.byteLength));
};
