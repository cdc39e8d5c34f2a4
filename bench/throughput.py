"""How much: pushing, consuming a backlog, and both at once, each as fast as the broker answers."""

from __future__ import annotations

import time

from bench.admin import delete_group
from bench.clients import Control, consumer, producer
from bench.measure import Figures, Machine, between
from bench.run import Backlog, Options, Run, temporary_queue
from bench.workload import Messages, Target

_QUIET_SECONDS = 5.0  # no message for so long while some are missing: they don't come any more


def push(target: Target, machine: Machine, options: Options, _: Backlog) -> Figures:
    """Producers only."""
    with temporary_queue(target, options) as queue:
        run = Run(target, machine, options)
        run.control.keep_ids = False
        messages = Messages(target, queue, options.partitions, options.payload, options.seed)
        for n in range(options.connections):
            start = n * options.partitions // options.connections
            run.loop.add(producer(run.control, messages, options.batch, start))
        before, after = run.window()
        run.stop()
        figures = between(run.loop, before, after, after.pushed - before.pushed)
        figures = {"connections": options.connections, "messages_per_s": figures["pushed_per_s"]} | figures
        return run.finish("push", figures)


def pop(target: Target, machine: Machine, options: Options, backlog: Backlog) -> Figures:
    """Consumers of a deep backlog: pop, acknowledge, and again."""
    guess = min(6000 * options.batch, 100_000) * (options.warmup + options.seconds)
    wanted = options.backlog or int(guess / options.groups)
    queue, filled = backlog.get(options, wanted)
    run = Run(target, machine, options)
    consumptions = run.consumptions(queue, options.wait_ms)
    for n in range(options.connections):
        run.loop.add(consumer(run.control, consumptions[n % options.groups], options.batch == 1))
    limit = filled * options.groups - 2 * options.connections * options.batch

    def tick(now: int) -> int | None:
        return None if run.control.counts.consumed >= limit else now + 10_000_000

    before, after = run.window(tick)
    if after.consumed >= limit:
        run.warnings.append("the backlog ran out before the time: the window is shorter (see --backlog)")
    run.stop()
    figures = between(run.loop, before, after, after.consumed - before.consumed)
    shape: Figures = {
        "connections": options.connections,
        "backlog": filled,
        "backlog_batch": options.backlog_batch,
        "messages_per_s": figures["consumed_per_s"],
    }
    figures["duplicates"] = _duplicates(run.control)
    for consumption in consumptions:
        delete_group(target, consumption.group)
    return run.finish("pop", shape | figures)


def both(target: Target, machine: Machine, options: Options, _: Backlog) -> Figures:
    """Producers and consumers at once; afterwards the rest is drained and every id is compared."""
    with temporary_queue(target, options) as queue:
        run = Run(target, machine, options)
        messages = Messages(target, queue, options.partitions, options.payload, options.seed)
        consumptions = run.consumptions(queue, options.wait_ms)
        for n in range(options.consumers):
            run.loop.add(consumer(run.control, consumptions[n % options.groups], options.batch == 1))
        for n in range(options.producers):
            start = n * options.partitions // options.producers
            run.loop.add(producer(run.control, messages, options.batch, start))
        before, after = run.window()
        run.control.producing = False
        figures: Figures = {"producers": options.producers, "consumers": options.consumers}
        in_and_out = (after.pushed - before.pushed + (after.consumed - before.consumed) / options.groups) / 2
        figures |= between(run.loop, before, after, in_and_out)
        figures["messages_per_s"] = figures["consumed_per_s"]
        figures |= _drain(run, messages)
        run.stop()
        return run.finish("both", figures)


def _drain(run: Run, messages: Messages) -> Figures:
    """Consume what is left, then compare the ids pushed with the ids delivered."""
    counts, groups = run.control.counts, run.options.groups
    deadline = time.monotonic() + max(10.0, 2 * run.options.seconds)
    last, last_change = -1, time.monotonic()
    while time.monotonic() < deadline and counts.consumed < counts.pushed * groups:
        run.loop.run(0.1)
        if counts.consumed != last:
            last, last_change = counts.consumed, time.monotonic()
        elif time.monotonic() - last_change > _QUIET_SECONDS:
            break
    pushed = {name for first, batch in run.control.accepted for name in messages.ids(first, batch)}
    missing = sum(len(pushed - set(ids)) for ids in run.control.delivered.values())
    # A pop or ack that failed leaves its lane leased, so what is behind it is late and not lost.
    settled = not missing or (time.monotonic() - last_change > _QUIET_SECONDS and not counts.errors)
    figures: Figures = {"duplicates": _duplicates(run.control)}
    if settled:
        figures["lost"] = missing
    else:
        figures["left_behind"] = missing
        run.warnings.append(f"{missing:,} messages did not come in time: losses could not be checked")
    return figures


def _duplicates(control: Control) -> int:
    return sum(len(ids) - len(set(ids)) for ids in control.delivered.values())
