// npm test: sets up what is missing, then runs all tests, the quick ones first. Stops at the first stage that fails.
//
//   npm test -- [--system]

import fs from 'node:fs';
import path from 'node:path';
import { buildPackage, guard, options, ROOT, run, setUp, SetupError } from './setup.mjs';

/** By name: Node 22 takes a folder for a module to run. */
const TOOL_TESTS = fs.readdirSync(path.join(ROOT, 'tests', 'tools')).filter((name) => name.endsWith('.test.mjs')).map((name) => `tests/tools/${name}`);

const STAGES = [
  ['server', 'node', ['--test', '--test-reporter=spec', ...TOOL_TESTS]],
  ['browsers: both have WebGPU, each the adapter it should', 'node', ['tools/lavapipe-chromium/probe.mjs']],
  ['crate: schedules, kernels, model, loading, command line', 'cargo', ['test', '--release']],
  ['build tool and demo model', 'cargo', ['test', '--release', '--package', 'xtask']],
  ['wasm, npm package and page in the browser', 'node', ['tests/browser/run.mjs'], buildPackage],
];

await guard(async () => {
  const { system } = options();
  await setUp({ forTests: true, system });
  let passed = 0;
  for (const [name, program, args, before] of STAGES) {
    const started = Date.now();
    console.log(`\n==== ${name}`);
    try {
      await before?.();
      await run(program, args);
    } catch (error) {
      console.log(`\nStages: ${passed} passed, 1 failed`);
      throw error instanceof SetupError ? new SetupError(`in "${name}": ${error.message}`) : error;
    }
    passed += 1;
    console.log(`==== ${name}: passed in ${((Date.now() - started) / 1000).toFixed(0)} s`);
  }
  console.log(`\nStages: ${passed} passed, 0 failed`);
});
