// The demo's web server: static files of this repository, for a browser on this machine.
//
//   /          www/      the demo page
//   /pkg/      pkg/      the npm package, built
//   /models/   models/   checkpoint folders
//
// Answers GET and HEAD, with byte ranges and ETags, as the loader's resumable downloads need them. Nothing outside the
// folders is reachable, dotfiles neither. `isolate` adds the two headers of cross-origin isolation, which Forecall does
// not need but which give a page finer clocks and shared memory.

import http from 'node:http';
import path from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import send from 'send';

const ROOT = path.resolve(path.dirname(fileURLToPath(import.meta.url)), '..');

/** URL prefix -> folder. The longest prefix that fits wins. */
export const DEMO_MOUNTS = {
  '/': path.join(ROOT, 'www'),
  '/pkg/': path.join(ROOT, 'pkg'),
  '/models/': path.join(ROOT, 'models'),
};

const STATUS_TEXT = { 400: 'bad path', 403: 'not served', 404: 'not found', 412: 'changed', 416: 'no such range' };

function refuse(response, status, headers = {}) {
  response.writeHead(status, { 'Content-Type': 'text/plain; charset=utf-8', ...headers });
  response.end(`${status} ${STATUS_TEXT[status] ?? http.STATUS_CODES[status] ?? ''}\n`);
}

function answer(request, response, mounts, isolate) {
  if (isolate) {
    response.setHeader('Cross-Origin-Opener-Policy', 'same-origin');
    response.setHeader('Cross-Origin-Embedder-Policy', 'require-corp');
    response.setHeader('Cross-Origin-Resource-Policy', 'same-origin');
  }
  if (request.method !== 'GET' && request.method !== 'HEAD') return refuse(response, 405, { Allow: 'GET, HEAD' });

  // The path is taken as it came (no URL parser, which would fold `..` away before it can be refused).
  const pathname = (request.url ?? '/').split(/[?#]/, 1)[0];
  const prefix = Object.keys(mounts)
    .filter((mount) => pathname.startsWith(mount))
    .sort((a, b) => b.length - a.length)[0];
  if (prefix === undefined) return refuse(response, 404);

  send(request, pathname.slice(prefix.length - 1), { root: mounts[prefix], dotfiles: 'ignore', cacheControl: false })
    .on('headers', () => response.setHeader('Cache-Control', 'no-cache'))
    .on('directory', () => refuse(response, 301, { Location: `${pathname.replace(/^\/+/, '/')}/` }))
    .on('error', (error) => refuse(response, error.status ?? 500, error.headers))
    .pipe(response);
}

/**
 * Starts the server on 127.0.0.1.
 * @param {{port?: number, isolate?: boolean, mounts?: Record<string, string>}} options port 0 takes any free one
 * @returns {Promise<{url: string, port: number, close: () => Promise<void>}>} `url` ends in a slash
 */
export async function serve({ port = 0, isolate = false, mounts = DEMO_MOUNTS } = {}) {
  const server = http.createServer((request, response) => answer(request, response, mounts, isolate));
  await new Promise((resolve, reject) => {
    server.once('error', (error) =>
      reject(error.code === 'EADDRINUSE' ? new Error(`port ${port} is taken: choose another with --port, or 0 for any`) : error),
    );
    server.listen(port, '127.0.0.1', resolve);
  });
  const taken = server.address().port;
  return {
    url: `http://127.0.0.1:${taken}/`,
    port: taken,
    close: () =>
      new Promise((resolve) => {
        server.close(() => resolve());
        server.closeAllConnections();
      }),
  };
}

/** Reads a port from text; an error names what was given. */
export function parsePort(text) {
  const port = Number(text);
  if (!/^\d+$/.test(text) || port > 65535) throw new Error(`port must be a number from 0 to 65535, got "${text}"`);
  return port;
}

if (process.argv[1] && path.resolve(process.argv[1]) === fileURLToPath(import.meta.url)) {
  const { values } = parseArgs({ options: { port: { type: 'string' }, isolate: { type: 'boolean', default: false } } });
  const { url } = await serve({ port: parsePort(values.port ?? process.env.PORT ?? '8080'), isolate: values.isolate });
  console.log(url);
}
