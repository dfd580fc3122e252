// Files that the user picked, as the checkpoint's folder.

import { ForecallError } from './errors.js';
import type { PickedFiles } from './engine.js';

/** A file and its name in the checkpoint's folder. */
export interface PickedFile {
  name: string;
  file: Blob;
}

/** How deep below the picked folder a file lies. */
const depth = (name: string): number => name.split('/').length;

/**
 * Names the files by their place in the checkpoint's folder: the one that holds the outermost file called `landmark`.
 * A folder picked as a whole comes with its name before every path, and may hold the checkpoint further down; files picked
 * one by one come without a path.
 */
export function namePicked(files: Iterable<File>, landmark: string): PickedFile[] {
  const all = Array.from(files, (file) => ({ name: file.webkitRelativePath || file.name, file }));
  const marks = all.filter(({ name }) => name.split('/').at(-1) === landmark).sort((a, b) => depth(a.name) - depth(b.name));
  const root = marks[0]?.name.slice(0, -landmark.length) ?? '';
  return all.filter(({ name }) => name.startsWith(root)).map(({ name, file }) => ({ name: name.slice(root.length), file }));
}

/** The engine's view of picked files. Only what is asked for is read. */
export function pickedFiles(files: readonly PickedFile[]): PickedFiles {
  const byName = new Map(files.map(({ name, file }) => [name, file]));
  return {
    size: async (name) => byName.get(name)?.size ?? null,
    read: async (name, start, end) => {
      const file = byName.get(name);
      try {
        if (!file) throw new Error('it was not picked');
        return new Uint8Array(await file.slice(start, end).arrayBuffer());
      } catch (cause) {
        const why = cause instanceof Error ? cause.message : String(cause);
        throw new ForecallError('Fetch', `${name} cannot be read: ${why} Pick the model's files again; they must not be moved or changed while it loads.`, { file: name }, { cause });
      }
    },
  };
}
