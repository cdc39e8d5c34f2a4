"""Waiting: how soon a parked consumer has a message, and what consumers cost that only wait."""

from __future__ import annotations

import time
from dataclasses import replace

from bench.clients import Post, consumer, filler, paced_producer, receiver, waiter
from bench.loop import Loop
from bench.measure import Figures, Machine, between, percentiles
from bench.run import Backlog, Options, Run, temporary_queue
from bench.workload import Consumption, Messages, Target

_LATENCY_ROOM = 1.0  # after the last message, before what has not come counts as lost


def latency(target: Target, machine: Machine, options: Options, _: Backlog) -> Figures:
    """From a push that is due to its receipt by a parked consumer, at a fixed rate of messages."""
    with temporary_queue(target, options) as queue:
        run = Run(target, machine, options)
        run.control.keep_ids = False
        messages = Messages(target, queue, options.partitions, options.payload, options.seed)
        options = run.options = replace(options, groups=1, wait_ms=max(options.wait_ms, 30_000))
        consumption = run.consumptions(queue, options.wait_ms)[0]
        post = Post()
        for _n in range(options.consumers):
            run.loop.add(receiver(run.control, consumption, post, run.loop, options.batch == 1))
        idle = [
            run.loop.add(paced_producer(run.control, messages, post, options.batch, n % options.partitions))
            for n in range(options.producers)
        ]
        period = int(1e9 * options.batch / options.rate)
        next_due = time.perf_counter_ns() + period

        def tick(now: int) -> int:
            nonlocal next_due
            while next_due <= now:
                # The moment this loop woke, not the exact one it asked for: epoll counts milliseconds.
                post.due.append(now)
                next_due += period
            for _ in range(len(idle)):
                if not post.due:
                    break
                connection = idle.pop(0)
                idle.append(connection)
                if connection.idle:
                    connection.resume()
            return next_due

        before, after = run.window(tick)
        run.loop.run(_LATENCY_ROOM)
        lost = len(post.sent) + len(post.due)
        samples = [end - due for due, end in post.received if before.at_ns <= due < after.at_ns]
        run.control.producing = run.control.consuming = False
        run.loop.close()
        figures = between(run.loop, before, after, after.consumed - before.consumed)
        figures["latency_ms"] = {"push to receipt": percentiles(samples)} | _without_empty(figures)
        shape: Figures = {
            "producers": options.producers,
            "consumers": options.consumers,
            "rate": options.rate,
            "messages_per_s": figures["consumed_per_s"],
        }
        figures |= {"left_behind" if run.control.counts.errors else "lost": lost, "duplicates": post.unknown}
        return run.finish("latency", shape | figures)


def _without_empty(figures: Figures) -> Figures:
    """Latencies of a run whose pops wait: how long a pop waited says nothing."""
    found = figures["latency_ms"]
    assert isinstance(found, dict)
    return {name: value for name, value in found.items() if name in ("push", "ack")}


def idle(target: Target, machine: Machine, options: Options, _: Backlog) -> Figures:
    """Consumers that wait for messages that don't come: what waiting costs."""
    with temporary_queue(target, options) as queue:
        run = Run(target, machine, options)
        messages = Messages(target, queue, options.partitions, options.payload, options.seed)
        starter = Loop(target.host, target.port)
        starter.add(filler(run.control, messages, 1, 0, options.partitions))
        starter.run(60.0)
        starter.close()
        for consumption in (consumptions := run.consumptions(queue, 0)):
            _read_all(run, consumption)
        rss_before = machine.broker.rss_bytes() if machine.broker else None
        wait_ms = int((options.seconds + options.warmup + 300) * 1000)
        parked = [Consumption(target, queue, item.group, options.batch, wait_ms) for item in consumptions]
        empty_before = run.control.counts.empty_pops
        for n in range(options.connections):
            run.loop.add(waiter(run.control, parked[n % options.groups]))
        before, after = run.window()
        rss_after = machine.broker.rss_bytes() if machine.broker else None
        bench_ns = after.bench_ns - before.bench_ns
        seconds = (after.at_ns - before.at_ns) / 1e9
        run.control.consuming = False
        run.loop.close()
        cpu = {
            "broker": _ms_per_second(before.broker_ns, after.broker_ns, seconds),
            "postgresql": _ms_per_second(before.postgres_ns, after.postgres_ns, seconds),
            "bench": round(bench_ns / 1e6 / seconds, 3),
        }
        known = [value for value in (cpu["broker"], cpu["postgresql"]) if value is not None]
        figures: Figures = {
            "connections": options.connections,
            "seconds": round(seconds, 3),
            "answered_while_parked": run.control.counts.empty_pops - empty_before,
            "cpu_ms_per_s": cpu,
            "server_cpu_ms_per_s": round(sum(known), 3) if known else None,
            "broker_rss_bytes": rss_after,
            "broker_rss_bytes_per_parked_pop": (
                round((rss_after - rss_before) / options.connections)
                if rss_before is not None and rss_after is not None
                else None
            ),
        }
        if before.database and after.database:
            # Commits of nearly idle backends are published too late to be told here.
            writes = after.database.write_transactions - before.database.write_transactions
            figures["write_transactions_per_s"] = round(writes / seconds, 2)
        return run.finish("idle", figures)


def _read_all(run: Run, consumption: Consumption) -> None:
    """Register a group and bring it to the end of its queue, so that its pops find nothing."""
    loop = Loop(run.target.host, run.target.port)
    control = run.control
    client = consumer(control, consumption, False)
    loop.add(client)
    misses = control.counts.empty_pops
    deadline = time.monotonic() + 60
    while control.counts.empty_pops < misses + 20 and time.monotonic() < deadline:
        loop.run(0.05)
    loop.close()


def _ms_per_second(before: int | None, after: int | None, seconds: float) -> float | None:
    return None if before is None or after is None else round((after - before) / 1e6 / seconds, 3)
