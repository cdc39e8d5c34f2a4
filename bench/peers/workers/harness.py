"""The part that load generators in Python share; `harness.mjs` is its twin in JavaScript.

A generator is one process, run by the interpreter of its peer's own virtual environment. It gets its task as
JSON in its only argument, says "ready" when it is connected, and obeys lines on standard input: "go", "sample"
(answered with counts and a clock), "stop" (answered with everything, then it ends). It counts; the caller
measures.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

_STOP_SECONDS = 5.0

Task = dict[str, Any]
Push = Callable[[list[Any], int], Awaitable[object]]
Stop = Callable[[], Awaitable[object]]


class Tally:
    """What this process counted."""

    def __init__(self, timed: bool) -> None:
        self.timed = timed
        self.count = 0
        self.errors = 0
        self.samples: list[str] = []
        self.latencies: list[int] = []

    def add(self, messages: int) -> None:
        """Count messages that are done with."""
        self.count += messages

    def error(self, problem: BaseException) -> None:
        """Count a failure, and keep the first few."""
        self.errors += 1
        if len(self.samples) < 3:
            self.samples.append(f"{type(problem).__name__}: {problem}"[:300])

    def received(self, message: dict[str, Any]) -> None:
        """Note how long a message was on its way, in the row that measures it."""
        self.latencies.append(now_micros() - int(message["sent"]))

    def state(self) -> dict[str, int]:
        """The counts and the clock of now."""
        return {"ns": now_micros() * 1000, "count": self.count, "errors": self.errors}


class Peer(Protocol):
    """What a peer's generator adds to this."""

    parsed: bool  # whether it pushes objects instead of text

    async def setup(self) -> None:
        """Create whatever the queue needs in an empty database."""

    async def pusher(self, index: int) -> Push:
        """Connect one producer."""

    async def consume(self, tally: Tally) -> Stop:
        """Start all consumers of this process."""


def now_micros() -> int:
    """The clock that all processes of this machine share."""
    return time.monotonic_ns() // 1000


class Generator:
    """One process's work."""

    def __init__(self, task: Task, peer: Peer) -> None:
        self._task = task
        self._peer = peer
        self._tally = Tally(task["timed"])
        self._batch: int = task["batch"]
        self._going = True
        self._next = 0
        texts = Path(task["payloads"]).read_text().splitlines()
        self._pool: list[Any] = [json.loads(text) for text in texts] if peer.parsed else list(texts)

    def _messages(self) -> list[Any]:
        pool, size = self._pool, len(self._pool)
        made = [pool[(self._next + n) % size] for n in range(self._batch)]
        self._next += self._batch
        if not self._tally.timed:
            return made
        sent = now_micros()
        if self._peer.parsed:
            return [{"sent": sent} | message for message in made]
        return [f'{{"sent":{sent},{message[1:]}' for message in made]

    async def _push_once(self, push: Push, lane: int) -> None:
        try:
            await push(self._messages(), lane)
            self._tally.add(self._batch)
        except Exception as problem:
            self._tally.error(problem)
            await asyncio.sleep(0.01)

    async def _push_loop(self, push: Push, index: int) -> None:
        task = self._task
        lane = (task["first"] + index) * task["lanes"] // task["total"]
        while self._going and (not task["limit"] or self._tally.count < task["limit"]):
            await self._push_once(push, lane)
            lane = (lane + 1) % task["lanes"]

    async def _push_paced(self, pushers: list[Push]) -> None:
        period = 1e6 / self._task["rate"]
        due = now_micros() + period * self._task["first"] / self._task["total"]
        running: set[asyncio.Task[None]] = set()
        turn = 0
        while self._going:
            due += period
            await asyncio.sleep(max(0.0, (due - now_micros()) / 1e6))
            push = pushers[turn % len(pushers)]
            started = asyncio.create_task(self._push_once(push, turn % self._task["lanes"]))
            running.add(started)
            started.add_done_callback(running.discard)
            turn += 1

    async def run(self) -> None:
        """Obey until "stop"."""
        task = self._task
        if task["role"] == "setup":
            await self._peer.setup()
            return
        indexes = range(task["connections"])
        pushers = [await self._peer.pusher(n) for n in indexes] if task["role"] == "push" else []
        commands = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
        print("ready", flush=True)
        work: list[asyncio.Task[None]] = []
        stop: Stop | None = None
        while line := (await commands.readline()).decode().strip():
            if line == "go":
                if task["role"] == "consume":
                    stop = await self._peer.consume(self._tally)
                elif task["rate"]:
                    work = [asyncio.create_task(self._push_paced(pushers))]
                else:
                    work = [asyncio.create_task(self._push_loop(push, n)) for n, push in enumerate(pushers)]
            elif line == "sample":
                print(json.dumps(self._tally.state()), flush=True)
            elif line == "stop":
                self._going = False
                if work:
                    await asyncio.wait(work, timeout=_STOP_SECONDS)
                if stop:
                    await asyncio.wait([asyncio.ensure_future(stop())], timeout=_STOP_SECONDS)
                break
        tally = self._tally
        print(json.dumps(tally.state() | {"samples": tally.samples, "latencies": tally.latencies}), flush=True)
        os._exit(0)  # libraries that still tidy up must not hold up the next row


def main(make: Callable[[Task], Peer]) -> None:
    """Run the generator of a peer on the fastest event loop there is."""
    import uvloop  # type: ignore[import-not-found,unused-ignore]

    task: Task = json.loads(sys.argv[1])
    peer = make(task)
    uvloop.run(Generator(task, peer).run())
