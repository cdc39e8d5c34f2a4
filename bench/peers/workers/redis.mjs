// Redis Streams: a lane is a stream, read by one consumer group; a batch is a pipeline of XADD.

import { require, run, task } from "./harness.mjs";

const Redis = require("ioredis").default ?? require("ioredis");
const name = (lane) => `bench-${lane}`;

function open() {
  const client = new Redis(task.port, "127.0.0.1");
  client.on("error", () => {});
  return client;
}

async function setup() {
  const client = open();
  await client.flushall();
  for (let lane = 0; lane < task.lanes; lane++) await client.xgroup("CREATE", name(lane), "readers", "0", "MKSTREAM");
  await client.quit();
}

async function pusher() {
  const client = open();
  await client.ping();
  return {
    async push(messages, lane) {
      if (messages.length === 1) {
        await client.xadd(name(lane), "*", "m", messages[0]);
        return;
      }
      const pipeline = client.pipeline();
      for (const text of messages) pipeline.xadd(name(lane), "*", "m", text);
      for (const [problem] of await pipeline.exec()) if (problem) throw problem;
    },
  };
}

function consumer(tally, index) {
  const client = open();
  const lanes = [];
  for (let lane = index; lane < task.lanes; lane += task.total) lanes.push(name(lane));
  let going = true;

  async function read(streams, block) {
    const start = ["GROUP", "readers", `c${index}`, "COUNT", task.batch];
    if (block) start.push("BLOCK", block);
    const answer = await client.xreadgroup(...start, "STREAMS", ...streams, ...streams.map(() => ">"));
    for (const [stream, entries] of answer ?? []) {
      if (task.timed) for (const [, fields] of entries) tally.received(fields[1]);
      await client.xack(stream, "readers", ...entries.map(([id]) => id));
      tally.add(entries.length);
    }
    return answer !== null;
  }

  async function loop() {
    let empty = task.timed ? lanes.length : 0;
    for (let n = 0; going; n++) {
      try {
        // One stream after the other while there is something, so that a batch is a batch of one lane.
        if (empty < lanes.length) empty = (await read([lanes[n % lanes.length]], 0)) ? 0 : empty + 1;
        else if ((await read(lanes, 1000)) && !task.timed) empty = 0;
      } catch (problem) {
        if (going) tally.error(problem);
      }
    }
  }
  const done = loop();
  return async () => {
    going = false;
    await done;
    client.disconnect();
  };
}

async function consume(tally) {
  const stops = [...Array(task.connections).keys()].map((n) => consumer(tally, task.first + n));
  return () => Promise.all(stops.map((stop) => stop()));
}

run({ setup, pusher, consume, parsed: false });
