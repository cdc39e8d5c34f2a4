// RabbitMQ: durable classic queues, persistent messages, publisher confirms, manual acks. A lane is a queue.

import { require, run, task } from "./harness.mjs";

const amqp = require("amqplib");
const name = (lane) => `bench-${lane}`;

async function setup() {
  const connection = await amqp.connect(task.url);
  const channel = await connection.createChannel();
  for (let lane = 0; lane < task.lanes; lane++) {
    await channel.deleteQueue(name(lane));
    await channel.assertQueue(name(lane), { durable: true });
  }
  await connection.close();
}

async function pusher() {
  const connection = await amqp.connect(task.url);
  connection.on("error", () => {});
  const channel = await connection.createConfirmChannel();
  return {
    async push(messages, lane) {
      for (const text of messages) channel.sendToQueue(name(lane), Buffer.from(text), { persistent: true });
      await channel.waitForConfirms();
    },
  };
}

async function consumer(tally, index) {
  const connection = await amqp.connect(task.url);
  const channel = await connection.createChannel();
  await channel.prefetch(task.batch);
  let unacknowledged = 0;
  let last = null;

  function acknowledge() {
    if (last === null) return;
    channel.ack(last, true);
    tally.add(unacknowledged);
    unacknowledged = 0;
    last = null;
  }

  function receive(message) {
    if (message === null) return;
    if (task.timed) tally.received(message.content.toString());
    last = message;
    unacknowledged += 1;
    if (unacknowledged >= task.batch) acknowledge();
  }

  // What is less than a batch must not wait for ever.
  const timer = setInterval(acknowledge, 50);
  for (let lane = index; lane < task.lanes; lane += task.total) await channel.consume(name(lane), receive);
  return async () => {
    clearInterval(timer);
    await connection.close();
  };
}

async function consume(tally) {
  const indexes = [...Array(task.connections).keys()];
  const stops = await Promise.all(indexes.map((n) => consumer(tally, task.first + n)));
  return () => Promise.all(stops.map((stop) => stop()));
}

run({ setup, pusher, consume, parsed: false });
