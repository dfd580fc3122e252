// What loading kept in the browser, for pages to list and delete.

import { ForecallError } from './errors.js';
import { locationOf } from './options.js';
import { allStores, Locks, type Store } from './store.js';

/** A stored model, or a stored draft adapter. */
export interface StoredModel {
  /** Names it in the store. */
  id: string;
  /** Repo id or folder address it was loaded from; `null` where its record cannot be read. */
  source: string | null;
  /** The commit, or what stands for one where there is none. */
  revision: string | null;
  role: 'model' | 'adapter';
  /** Bytes in the store. */
  bytes: number;
  /** Whether it is whole. One that is not goes on where it stopped when it is loaded again. */
  complete: boolean;
  /** When it was begun, and when it was last loaded. */
  created: Date | null;
  used: Date | null;
}

/** Repo ids are listed, and deleted, whatever their revision. */
const withoutRevision = (source: string): string => source.replace(/^([^/:@]+\/[^/:@]+)@.*$/, '$1');

/** What the engine keeps of an entry, as far as it is read here. */
interface Manifest {
  source?: unknown;
  revision?: unknown;
  role?: unknown;
  complete?: unknown;
  created?: unknown;
  used?: unknown;
}
const MANIFEST = 'manifest.json';

/** What the browser throws, as an error of this package. */
async function typed<T>(work: Promise<T>): Promise<T> {
  try {
    return await work;
  } catch (cause) {
    if (cause instanceof ForecallError) throw cause;
    const why = cause instanceof Error ? `${cause.name}: ${cause.message}` : String(cause);
    if (cause instanceof DOMException && cause.name === 'NoModificationAllowedError') throw new ForecallError('Busy', `a stored file is in use: wait until the load that uses it is done, or stop it. (${why})`, {}, { cause });
    throw new ForecallError('Unsupported', `the browser refuses its storage to this page: ${why}`, {}, { cause });
  }
}

async function list(): Promise<StoredModel[]> {
  const found: StoredModel[] = [];
  for (const store of await allStores()) found.push(...(await entriesOf(store)));
  return found.sort((a, b) => (b.used?.getTime() ?? 0) - (a.used?.getTime() ?? 0));
}

async function entriesOf(store: Store): Promise<StoredModel[]> {
  const bytes = new Map<string, number>();
  for (const [name, size] of await store.list('')) {
    const entry = name.split('/', 1)[0] as string;
    bytes.set(entry, (bytes.get(entry) ?? 0) + size);
  }
  return Promise.all(
    Array.from(bytes, async ([id, bytes]) => {
      const { source, revision, role, complete, created, used } = await manifestOf(store, id);
      const time = (value: unknown): Date | null => (typeof value === 'number' ? new Date(value) : null);
      const text = (value: unknown): string | null => (typeof value === 'string' ? value : null);
      return { id, source: typeof source === 'string' ? withoutRevision(source) : null, revision: text(revision), role: role === 'adapter' ? ('adapter' as const) : ('model' as const), bytes, complete: complete === true, created: time(created), used: time(used) };
    }),
  );
}

async function manifestOf(store: Store, id: string): Promise<Manifest> {
  try {
    const manifest: unknown = JSON.parse(new TextDecoder().decode(await store.get(`${id}/${MANIFEST}`)));
    return typeof manifest === 'object' && manifest !== null ? manifest : {};
  } catch {
    return {};
  }
}

async function size(): Promise<number> {
  return (await list()).reduce((sum, { bytes }) => sum + bytes, 0);
}

async function remove(...given: [what?: string | URL | StoredModel]): Promise<number> {
  const [what] = given;
  // An item that was looked for and not found must not delete all of them.
  if (given.length > 0 && !(typeof what === 'string' || what instanceof URL || typeof what?.id === 'string')) {
    throw new ForecallError('InvalidOption', 'storage.delete takes a source or an item of storage.list(); without any argument it deletes everything.', { option: 'what' });
  }
  const source = typeof what === 'string' || what instanceof URL ? withoutRevision(locationOf('the source', what)) : null;
  const wanted = (entry: StoredModel): boolean => what === undefined || (source === null ? entry.id === (what as StoredModel).id : entry.source === source);
  let deleted = 0;
  const locks = new Locks();
  try {
    for (const store of await allStores()) {
      for (const entry of (await entriesOf(store)).filter(wanted)) {
        if (!(await locks.take(entry.id))) throw new ForecallError('Busy', `${entry.source ?? entry.id} is being stored by a load: wait until it is done, or stop it.`);
        await store.remove(`${entry.id}/`);
        deleted += 1;
      }
    }
  } finally {
    locks.release();
  }
  return deleted;
}

async function persist(): Promise<boolean> {
  return (await navigator.storage?.persist?.()) ?? false;
}

/** Stored models of this site (origin). Everything here rejects with a {@link ForecallError}. */
export const storage = {
  /** Stored models, the last used first. */
  list: (): Promise<StoredModel[]> => typed(list()),

  /** Bytes of all that is stored. */
  size: (): Promise<number> => typed(size()),

  /**
   * Deletes what was stored of a source (repo id, address, or an item of `list`); all of it without one. Loaded models go on.
   * Answers how many were deleted; rejects with `Busy` while another load writes one of them.
   */
  delete: (...what: [what?: string | URL | StoredModel]): Promise<number> => typed(remove(...what)),

  /**
   * Asks the browser not to clear this site's storage by itself when space runs short. Answers whether it will not; browsers
   * decide by their own rules, and some ask the user.
   */
  persist: (): Promise<boolean> => typed(persist()),
};
