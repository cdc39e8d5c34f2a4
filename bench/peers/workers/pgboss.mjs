// pg-boss: a queue in PostgreSQL. Jobs are fetched and completed in batches by loops, which is what its
// `work` does too, but without `work`'s pause of half a second or more between two batches.

import { require, run, task } from "./harness.mjs";

const PgBoss = require("pg-boss");
const QUEUE = "bench";

async function open(max, extra = {}) {
  const boss = new PgBoss({ ...task.postgres, max, supervise: false, schedule: false, ...extra });
  boss.on("error", () => {});
  return boss.start();
}

let shared = null;

async function setup() {
  const boss = await open(2);
  await boss.createQueue(QUEUE);
  await boss.stop({ graceful: false });
}

async function pusher() {
  shared ??= open(task.connections, { migrate: false });
  const boss = await shared;
  return {
    push: (messages) =>
      messages.length === 1
        ? boss.send(QUEUE, messages[0])
        : boss.insert(messages.map((data) => ({ name: QUEUE, data }))),
  };
}

async function consume(tally) {
  const boss = await open(task.connections, { migrate: false });
  let going = true;

  if (task.timed) {
    // It polls, at most twice a second: batches of one could not even keep up.
    const options = { batchSize: 100, pollingIntervalSeconds: 0.5 };
    for (let n = 0; n < task.connections; n++) {
      await boss.work(QUEUE, options, async (jobs) => {
        for (const job of jobs) tally.receivedObject(job.data);
        tally.add(jobs.length);
      });
    }
    return () => boss.stop({ graceful: false });
  }

  async function loop() {
    while (going) {
      try {
        const jobs = await boss.fetch(QUEUE, { batchSize: task.batch });
        if (jobs.length === 0) {
          await new Promise((resolve) => setTimeout(resolve, 5));
          continue;
        }
        await boss.complete(QUEUE, jobs.map((job) => job.id));
        tally.add(jobs.length);
      } catch (problem) {
        if (going) tally.error(problem);
      }
    }
  }
  const loops = [...Array(task.connections)].map(loop);
  return async () => {
    going = false;
    await Promise.all(loops);
  };
}

run({ setup, pusher, consume, parsed: true });
