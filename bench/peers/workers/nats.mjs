// NATS JetStream: one stream in a file, a subject for each lane, one durable pull consumer with explicit acks.

import { require, run, task } from "./harness.mjs";

const { AckPolicy, StorageType, StringCodec, connect } = require("nats");
const codec = StringCodec();
const STREAM = "bench";
const options = { servers: task.url, maxReconnectAttempts: 0 };

async function setup() {
  const connection = await connect(options);
  const manager = await connection.jetstreamManager();
  await manager.streams.delete(STREAM).catch(() => {});
  await manager.streams.add({ name: STREAM, subjects: ["bench.*"], storage: StorageType.File });
  const consumer = { durable_name: "reader", ack_policy: AckPolicy.Explicit, max_ack_pending: 100000 };
  await manager.consumers.add(STREAM, consumer);
  await connection.close();
}

async function pusher() {
  const connection = await connect(options);
  const jetstream = connection.jetstream();
  return {
    push: (messages, lane) =>
      Promise.all(messages.map((text) => jetstream.publish(`bench.${lane}`, codec.encode(text)))),
  };
}

async function consumer(tally) {
  const connection = await connect(options);
  const reader = await connection.jetstream().consumers.get(STREAM, "reader");
  let going = true;

  async function loop() {
    while (going) {
      try {
        const fetched = await reader.fetch({ max_messages: task.batch, expires: 1000 });
        for await (const message of fetched) {
          if (task.timed) tally.received(codec.decode(message.data));
          message.ack();
          tally.add(1);
        }
      } catch (problem) {
        if (going) tally.error(problem);
      }
    }
  }
  const done = loop();
  return async () => {
    going = false;
    await done;
    await connection.close();
  };
}

async function consume(tally) {
  const stops = await Promise.all([...Array(task.connections)].map(() => consumer(tally)));
  return () => Promise.all(stops.map((stop) => stop()));
}

run({ setup, pusher, consume, parsed: false });
