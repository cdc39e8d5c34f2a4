// graphile-worker: a job queue in PostgreSQL. Batches are its local queue and its batched completions.

import { require, run, task } from "./harness.mjs";

const worker = require("graphile-worker");
const { Pool } = require("pg");

const silent = new worker.Logger(() => () => {});

function pool(max) {
  const made = new Pool({ ...task.postgres, max });
  made.on("error", () => {});
  return made;
}

async function setup() {
  const pgPool = pool(1);
  await worker.runMigrations({ pgPool, logger: silent });
  await pgPool.end();
}

let shared = null;

async function pusher() {
  shared ??= worker.makeWorkerUtils({ pgPool: pool(task.connections), logger: silent });
  const utils = await shared;
  return {
    push: (messages) =>
      messages.length === 1
        ? utils.addJob("bench", messages[0])
        : utils.addJobs(messages.map((payload) => ({ identifier: "bench", payload }))),
  };
}

async function consume(tally) {
  const together = task.connections * task.batch;
  const batching =
    task.batch > 1 ? { localQueue: { size: together }, completeJobBatchDelay: 0, failJobBatchDelay: 0 } : {};
  const runner = await worker.run({
    pgPool: pool(task.connections + 1), // one of them only listens
    logger: silent,
    noHandleSignals: true,
    taskList: {
      bench: (payload) => {
        tally.receivedObject(payload);
        tally.add(1);
      },
    },
    preset: { worker: { concurrentJobs: together, ...batching } },
  });
  return () => runner.stop();
}

run({ setup, pusher, consume, parsed: true });
