"""What every scenario shares: its options, one execution with its window, and the backlog."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench.admin import delete_queue
from bench.clients import Control, filler
from bench.loop import Loop
from bench.measure import Figures, Machine, Sample, close_window, open_window, say
from bench.workload import Consumption, Messages, Target

_STOP_SECONDS = 35.0  # longer than a broker's statement timeout
_FILL_CONNECTIONS = 16


@dataclass(frozen=True)
class Options:
    """What can be chosen for one row."""

    connections: int = 64
    producers: int = 16
    consumers: int = 16
    batch: int = 1
    partitions: int = 64
    groups: int = 1
    payload: int = 200
    seconds: float = 5.0
    warmup: float = 1.0
    rate: float = 200.0
    wait_ms: int = 1000
    backlog: int = 0
    backlog_batch: int = 100
    seed: int = 1
    queue: str | None = None


def queue_name(options: Options) -> str:
    """The queue asked for, or a fresh one."""
    return options.queue or f"bench-{uuid.uuid4().hex[:12]}"


def remove(target: Target, queue: str, options: Options) -> None:
    """Delete a queue of our own; one that the caller named may hold more than our messages."""
    if options.queue is None:
        delete_queue(target, queue)


@contextlib.contextmanager
def temporary_queue(target: Target, options: Options) -> Iterator[str]:
    """The queue of one run, removed however the run ends."""
    queue = queue_name(options)
    try:
        yield queue
    finally:
        remove(target, queue, options)


class Backlog:
    """Queues filled in advance, one for each shape: a new consumer group reads one from the start.

    Filling takes longer than reading, so all rows of a run that may share a backlog do.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._filled: dict[tuple[object, ...], tuple[str, int]] = {}

    def get(self, options: Options, wanted: int) -> tuple[str, int]:
        """A queue with at least `wanted` messages of this shape, and their exact number."""
        shape = (options.partitions, options.payload, options.backlog_batch, options.queue)
        found = self._filled.get(shape)
        if found is None or found[1] < wanted:
            already = found[1] if found else 0
            name = found[0] if found else queue_name(options)
            found = name, already + self._fill(name, options, wanted - already)
            self._filled[shape] = found
        return found

    def close(self, options: Options) -> None:
        """Delete the queues."""
        for name, _ in self._filled.values():
            remove(self._target, name, options)
        self._filled.clear()

    def _fill(self, name: str, options: Options, wanted: int) -> int:
        batch = options.backlog_batch
        pushes = -(-wanted // (batch * _FILL_CONNECTIONS))
        total = pushes * batch * _FILL_CONNECTIONS
        say(f"filling {name} with {total:,} messages ...")
        messages = Messages(self._target, name, options.partitions, options.payload, options.seed)
        control = Control(keep_ids=False)
        loop = Loop(self._target.host, self._target.port)
        started = time.monotonic()
        for n in range(_FILL_CONNECTIONS):
            start = n * options.partitions // _FILL_CONNECTIONS
            loop.add(filler(control, messages, batch, start, pushes))
        while loop.running and control.counts.errors < _FILL_CONNECTIONS:
            loop.run(1.0)
        loop.close()
        if control.counts.pushed != total:
            samples = "; ".join(control.counts.error_samples)
            raise RuntimeError(f"the backlog could not be written: {samples or loop.last_refusal}")
        say(f"  {total / (time.monotonic() - started):,.0f} messages/s")
        return total


class Run:
    """One execution of one scenario: a loop, its clients, and the samples around the window."""

    def __init__(self, target: Target, machine: Machine, options: Options) -> None:
        self.target = target
        self.machine = machine
        self.options = options
        self.loop = Loop(target.host, target.port)
        self.control = Control()
        self.warnings: list[str] = []

    def window(self, tick: Callable[[int], int | None] | None = None) -> tuple[Sample, Sample]:
        """Warm up, then measure; the clients go on."""
        self.loop.run(self.options.warmup, tick)
        before = open_window(self.machine, self.loop, self.control.counts)
        self.loop.run(self.options.seconds, tick)
        return before, close_window(self.machine, self.loop, self.control.counts)

    def stop(self) -> None:
        """Let every client finish what it is doing."""
        self.control.producing = self.control.consuming = False
        self.loop.run(_STOP_SECONDS)
        if self.loop.running:
            self.warnings.append(f"{self.loop.running} connections still wait for an answer")
        self.loop.close()

    def consumptions(self, queue: str, wait_ms: int) -> list[Consumption]:
        """One per consumer group; the groups are new."""
        name = uuid.uuid4().hex[:8]
        return [
            Consumption(self.target, queue, f"g{n}-{name}", self.options.batch, wait_ms)
            for n in range(self.options.groups)
        ]

    def finish(self, name: str, figures: Figures) -> Figures:
        """Add to the figures what is not about the window: the shape, the errors."""
        options, counts = self.options, self.control.counts
        shape: Figures = {
            "scenario": name,
            "batch": options.batch,
            "partitions": options.partitions,
            "groups": options.groups,
            "payload": options.payload,
            "wait_ms": options.wait_ms,
        }
        if isinstance(share := figures.get("bench_core_share"), float) and share > 0.8:
            self.warnings.append(f"the generator used {share:.0%} of a core: it may be the bottleneck")
        ends: Figures = {
            "errors": counts.errors + self.loop.refused,
            "error_samples": counts.error_samples + [self.loop.last_refusal] * bool(self.loop.refused),
            "reconnects": self.loop.reconnects,
            "push_statuses": counts.statuses,
            "warnings": self.warnings,
        }
        return shape | figures | ends
