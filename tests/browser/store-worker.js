// Puts blobs of given sizes into the package's store, and tells how that went.
import { openStore } from '/pkg/dist/store.js';

onmessage = async ({ data: { name, bytes } }) => {
  const store = await openStore();
  postMessage(await store.put(name, new Uint8Array(bytes)).then(() => 'put', (error) => error.name));
};
