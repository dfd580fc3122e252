// npm start: sets up what is missing, builds, and serves the demo with its model until it is stopped.
//
//   npm start -- [--port N] [--isolate] [--system]
//
// The port is --port, else PORT, else 8080 or, where that is taken, any free one. The address is printed as the last line.

import { buildPackage, DEMO_MODEL, guard, options, setUp, SetupError } from './setup.mjs';

await guard(async () => {
  const given = options({ port: { type: 'string' }, isolate: { type: 'boolean', default: false } });
  await setUp({ system: given.system });
  await buildPackage();

  // Loaded only now: it stands on an npm package that set-up installs.
  const { parsePort, serve } = await import('./serve.mjs');
  const asked = given.port ?? process.env.PORT;
  const start = (port) => serve({ port, isolate: given.isolate });
  let server;
  try {
    server = asked === undefined ? await start(8080).catch(() => start(0)) : await start(parsePort(asked));
  } catch (error) {
    throw new SetupError(error.message);
  }
  for (const signal of ['SIGINT', 'SIGTERM']) {
    process.on(signal, async () => {
      await server.close();
      process.exit(0);
    });
  }
  console.log(`\nThe demo runs until you press Ctrl+C. Its model is served at /models/${DEMO_MODEL}/.\n${server.url}`);
});
