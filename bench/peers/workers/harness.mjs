// The part that load generators in JavaScript share; `harness.py` is its twin in Python.
//
// A generator is one process. It gets its task as JSON in its only argument, says "ready" when it is connected,
// and obeys lines on standard input: "go", "sample" (answered with counts and a clock), "stop" (answered with
// everything, then it ends). It counts; the caller measures.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

export const task = JSON.parse(process.argv[2]);

// The libraries are in a directory of the caller's, not beside this file.
export const require = createRequire(`${task.modules}/`);

const nowMicros = () => Number(process.hrtime.bigint() / 1000n);

class Tally {
  count = 0;
  errors = 0;
  samples = [];
  latencies = [];

  // Messages whose delivery is over and acknowledged.
  add(messages) {
    this.count += messages;
  }

  error(problem) {
    this.errors += 1;
    if (this.samples.length < 3) this.samples.push(String(problem?.message ?? problem).slice(0, 300));
  }

  // A message has come: text of it, in the row that measures how long it took.
  received(text) {
    if (!task.timed) return;
    const found = /^\{"sent":\s*(\d+)/.exec(text);
    if (found) this.latencies.push(nowMicros() - Number(found[1]));
  }

  receivedObject(object) {
    if (task.timed) this.latencies.push(nowMicros() - object.sent);
  }
}

const tally = new Tally();
let going = true;

const texts = readFileSync(task.payloads, "utf8").split("\n").filter(Boolean);
const objects = texts.map((text) => JSON.parse(text));
let next = 0;

function messages(parsed) {
  const pool = parsed ? objects : texts;
  const made = new Array(task.batch);
  for (let n = 0; n < task.batch; n++) made[n] = pool[next++ % pool.length];
  if (!task.timed) return made;
  const sent = nowMicros();
  return parsed
    ? made.map((object) => ({ sent, ...object }))
    : made.map((text) => `{"sent":${sent},${text.slice(1)}`);
}

async function pushOnce(pusher, lane, parsed) {
  try {
    await pusher.push(messages(parsed), lane);
    tally.add(task.batch);
    return true;
  } catch (problem) {
    tally.error(problem);
    await new Promise((resolve) => setTimeout(resolve, 10));
    return false;
  }
}

async function pushLoop(pusher, index, parsed) {
  let lane = Math.floor(((task.first + index) * task.lanes) / task.total);
  while (going && (!task.limit || tally.count < task.limit)) {
    await pushOnce(pusher, lane, parsed);
    lane = (lane + 1) % task.lanes;
  }
}

async function pushPaced(pushers, parsed) {
  const period = 1e6 / task.rate;
  let due = nowMicros() + period * (task.first / task.total);
  for (let n = 0; going; n++) {
    due += period;
    const wait = (due - nowMicros()) / 1000;
    if (wait > 0) await new Promise((resolve) => setTimeout(resolve, wait));
    pushOnce(pushers[n % pushers.length], n % task.lanes, parsed);
  }
}

function answer(fields) {
  process.stdout.write(`${JSON.stringify(fields)}\n`);
}

function state() {
  return { ns: nowMicros() * 1000, count: tally.count, errors: tally.errors };
}

// `peer` has: setup(), pusher(index) giving {push(messages, lane)}, parsed (whether it pushes objects instead of
// text), and consume(tally) giving a function that stops it.
export async function run(peer) {
  if (task.role === "setup") {
    await peer.setup();
    process.exit(0);
  }
  const indexes = [...Array(task.connections).keys()];
  const pushers = task.role === "push" ? await Promise.all(indexes.map((n) => peer.pusher(task.first + n))) : [];
  process.stdout.write("ready\n");
  let work = Promise.resolve();
  let stop = null;
  for await (const line of createInterface({ input: process.stdin })) {
    if (line === "go") {
      if (task.role === "consume") stop = await peer.consume(tally);
      else if (task.rate) work = pushPaced(pushers, peer.parsed);
      else work = Promise.all(pushers.map((pusher, n) => pushLoop(pusher, n, peer.parsed)));
    } else if (line === "sample") {
      answer(state());
    } else if (line === "stop") {
      going = false;
      const patience = new Promise((resolve) => setTimeout(resolve, 5000));
      await Promise.race([Promise.all([work, stop?.()]), patience]);
      process.stdout.write(`${JSON.stringify({ ...state(), samples: tally.samples, latencies: tally.latencies })}\n`, () =>
        process.exit(0),
      );
    }
  }
}

process.on("unhandledRejection", (problem) => tally.error(problem));
