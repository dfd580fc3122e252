// The engine's blob store, the other primitive besides `transport.ts`: named blobs, each in an entry, written once or
// replaced as a whole. What goes in, and when it is still good, is decided in the engine.
//
// They lie in the origin private file system. Where that is missing (or refused, as in some private windows), the Cache
// API holds them.

import type { BlobStore } from './engine.js';

/** Name of the folder, of the cache, and of all locks. */
const NAME = 'forecall';
/** How long a lock is waited for: a worker that was just ended lets go of it at once. */
const LOCK_WAIT_MS = 1000;
/** A file that another worker has open is tried so often, and again after so long. */
const OPEN_TRIES = 20;
const OPEN_AGAIN_MS = 50;
const TEMPORARY = '.tmp';

/** A {@link BlobStore} in plain values, as page and worker use it. Names are `entry/blob`; a prefix is empty, `entry/`, or a name. */
export interface Store {
  get(name: string): Promise<Uint8Array | undefined>;
  /** Atomic: afterwards the name has all of these bytes or what it had before. In workers only. */
  put(name: string, bytes: Uint8Array): Promise<void>;
  list(prefix: string): Promise<[name: string, bytes: number][]>;
  remove(prefix: string): Promise<void>;
  /** Removes what a worker left of an entry that was ended in the middle of a `put`. For whoever has the entry's lock. */
  sweep(entry: string): Promise<void>;
}

/** Not in TypeScript's library for pages: exists in workers only. */
interface SyncAccessHandle {
  truncate(size: number): void | Promise<void>;
  write(bytes: Uint8Array, options: { at: number }): number;
  flush(): void | Promise<void>;
  close(): void | Promise<void>;
}
type WorkerFileHandle = FileSystemFileHandle & { createSyncAccessHandle(): Promise<SyncAccessHandle>; move?(name: string): Promise<void> };

function isMissing(error: unknown): boolean {
  return error instanceof DOMException && (error.name === 'NotFoundError' || error.name === 'TypeMismatchError');
}

class FileStore implements Store {
  readonly #root: FileSystemDirectoryHandle;

  constructor(root: FileSystemDirectoryHandle) {
    this.#root = root;
  }

  async get(name: string): Promise<Uint8Array | undefined> {
    const [entry, blob] = split(name);
    try {
      const folder = await this.#root.getDirectoryHandle(entry);
      const file = await (await folder.getFileHandle(blob)).getFile();
      return new Uint8Array(await file.arrayBuffer());
    } catch (error) {
      if (isMissing(error)) return undefined;
      throw error;
    }
  }

  async put(name: string, bytes: Uint8Array): Promise<void> {
    const [entry, blob] = split(name);
    const folder = await this.#root.getDirectoryHandle(entry, { create: true });
    // A worker may be ended in the middle of a write, so what has the name is always whole.
    const file = (await folder.getFileHandle(blob + TEMPORARY, { create: true })) as WorkerFileHandle;
    if (file.move) {
      try {
        await write(file, bytes);
        await file.move(blob);
      } catch (error) {
        // It is listed nowhere, so nobody else would free its room.
        await folder.removeEntry(blob + TEMPORARY).catch(() => {});
        throw error;
      }
    } else {
      // Without a rename the write is not atomic; the engine sees by a blob's own length whether it is whole.
      await folder.removeEntry(blob + TEMPORARY);
      await write((await folder.getFileHandle(blob, { create: true })) as WorkerFileHandle, bytes);
    }
  }

  async list(prefix: string): Promise<[string, number][]> {
    const found: [string, number][] = [];
    for await (const [entry, folder] of this.#root.entries()) {
      if (!(folder instanceof FileSystemDirectoryHandle) || !within(entry, prefix)) continue;
      try {
        for await (const [blob, file] of folder.entries()) {
          if (!(file instanceof FileSystemFileHandle) || blob.endsWith(TEMPORARY) || !covers(prefix, `${entry}/${blob}`)) continue;
          found.push([`${entry}/${blob}`, (await file.getFile()).size]);
        }
      } catch (error) {
        if (!isMissing(error)) throw error; // deleted meanwhile
      }
    }
    return found;
  }

  async remove(prefix: string): Promise<void> {
    try {
      if (prefix === '') {
        for await (const entry of this.#root.keys()) await this.#root.removeEntry(entry, { recursive: true });
      } else if (prefix.endsWith('/')) {
        await this.#root.removeEntry(prefix.slice(0, -1), { recursive: true });
      } else {
        const [entry, blob] = split(prefix);
        await (await this.#root.getDirectoryHandle(entry)).removeEntry(blob);
      }
    } catch (error) {
      if (!isMissing(error)) throw error;
    }
  }

  async sweep(entry: string): Promise<void> {
    try {
      const folder = await this.#root.getDirectoryHandle(entry);
      for await (const blob of folder.keys()) if (blob.endsWith(TEMPORARY)) await folder.removeEntry(blob);
    } catch (error) {
      if (!isMissing(error)) throw error;
    }
  }
}

async function write(file: WorkerFileHandle, bytes: Uint8Array): Promise<void> {
  const handle = await openForWriting(file);
  try {
    await handle.truncate(0);
    for (let at = 0; at < bytes.length; ) {
      const written = handle.write(bytes.subarray(at), { at });
      // Chromium has been seen to answer a full disk with a negative number that was taken for an unsigned one.
      if (!(written > 0 && written <= bytes.length - at)) throw new DOMException('the browser takes no more bytes', 'QuotaExceededError');
      at += written;
    }
    await handle.flush();
  } finally {
    await handle.close();
  }
}

/** A worker that was just ended may not have let go of the file yet. */
async function openForWriting(file: WorkerFileHandle): Promise<SyncAccessHandle> {
  for (let tries = 1; ; tries++) {
    try {
      return await file.createSyncAccessHandle();
    } catch (error) {
      const busy = error instanceof DOMException && error.name === 'NoModificationAllowedError';
      if (!busy || tries >= OPEN_TRIES) throw error;
      await new Promise((resolve) => setTimeout(resolve, OPEN_AGAIN_MS));
    }
  }
}

class CacheStore implements Store {
  readonly #cache: Cache;

  constructor(cache: Cache) {
    this.#cache = cache;
  }

  async get(name: string): Promise<Uint8Array | undefined> {
    const response = await this.#cache.match(addressOf(name));
    return response && new Uint8Array(await response.arrayBuffer());
  }

  async put(name: string, bytes: Uint8Array): Promise<void> {
    // The length is told once more because a stored response's body must be read to be measured.
    await this.#cache.put(addressOf(name), new Response(bytes as Uint8Array<ArrayBuffer>, { headers: { 'content-length': String(bytes.length) } }));
  }

  async list(prefix: string): Promise<[string, number][]> {
    const found: [string, number][] = [];
    for (const name of await this.#names(prefix)) {
      const response = await this.#cache.match(addressOf(name));
      if (response) found.push([name, Number(response.headers.get('content-length'))]);
    }
    return found;
  }

  async remove(prefix: string): Promise<void> {
    for (const name of await this.#names(prefix)) await this.#cache.delete(addressOf(name));
  }

  async sweep(): Promise<void> {} // a response is put as a whole

  async #names(prefix: string): Promise<string[]> {
    const start = addressOf('').length;
    return (await this.#cache.keys()).map(({ url }) => decodeURI(url.slice(start))).filter((name) => covers(prefix, name));
  }
}

/** An address that only serves as a key: nothing is ever asked for there. */
function addressOf(name: string): string {
  return `${globalThis.origin}/.${NAME}/${name}`;
}

function split(name: string): [entry: string, blob: string] {
  const parts = name.split('/');
  const [entry, blob] = parts;
  if (parts.length !== 2 || !entry || !blob) throw new TypeError(`"${name}" names no blob of an entry`);
  return [entry, blob];
}

/** Whether an entry may hold names that `prefix` covers. */
function within(entry: string, prefix: string): boolean {
  return prefix === '' || prefix.split('/')[0] === entry;
}

function covers(prefix: string, name: string): boolean {
  return prefix === '' || (prefix.endsWith('/') ? name.startsWith(prefix) : name === prefix);
}

async function fileStore(): Promise<Store | null> {
  try {
    const root = await navigator.storage.getDirectory();
    return new FileStore(await root.getDirectoryHandle(NAME, { create: true }));
  } catch {
    return null;
  }
}

/** `ifThere`: makes no cache where there is none. */
async function cacheStore(ifThere: boolean): Promise<Store | null> {
  try {
    return ifThere && !(await caches.has(NAME)) ? null : new CacheStore(await caches.open(NAME));
  } catch {
    return null;
  }
}

/** The store for new blobs; `null` where the browser offers none (pages that are neither https nor localhost). */
export async function openStore(): Promise<Store | null> {
  const canWrite = typeof FileSystemFileHandle !== 'undefined' && 'createSyncAccessHandle' in FileSystemFileHandle.prototype;
  return ((canWrite || null) && (await fileStore())) ?? cacheStore(false);
}

/** Every place where there may be blobs: the browser may have had its ways. */
export async function allStores(): Promise<Store[]> {
  return (await Promise.all([fileStore(), cacheStore(true)])).filter((store) => store !== null);
}

/** Locks that are held until they are all let go of. */
export class Locks {
  readonly #held = new Set<string>();
  #release!: () => void;
  readonly #released = new Promise<void>((resolve) => {
    this.#release = resolve;
  });

  /** Whether it was to be had, after a short wait. Two tabs may want to write the same entry. */
  async take(name: string): Promise<boolean> {
    // Browsers without them have no way to ask; each blob is whole all the same.
    if (this.#held.has(name) || !navigator.locks) return true;
    const giveUp = new AbortController();
    const timer = setTimeout(() => giveUp.abort(), LOCK_WAIT_MS);
    const taken = await new Promise<boolean>((resolve, reject) => {
      const hold = (): Promise<void> => {
        resolve(true);
        return this.#released;
      };
      navigator.locks.request(`${NAME}/${name}`, { signal: giveUp.signal }, hold).catch((error: unknown) => (giveUp.signal.aborted ? resolve(false) : reject(error)));
    });
    clearTimeout(timer);
    if (taken) this.#held.add(name);
    return taken;
  }

  release(): void {
    this.#release();
  }
}

/** The engine's view of `store`. */
export function blobStore(store: Store, locks: Locks): BlobStore {
  return {
    get: (name) => store.get(name),
    put: (name, bytes) => store.put(name, bytes),
    list: async (prefix) => JSON.stringify(await store.list(prefix)),
    remove: (prefix) => store.remove(prefix),
    lock: async (name) => {
      const taken = await locks.take(name);
      // Without locks another tab may be writing.
      if (taken && navigator.locks) await store.sweep(name).catch(() => {});
      return taken;
    },
  };
}
