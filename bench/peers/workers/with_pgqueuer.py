"""pgqueuer: a job queue in PostgreSQL. Each consumer is a queue manager of its own on its own connection."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import asyncpg  # type: ignore[import-not-found,import-untyped,unused-ignore]
from harness import Push, Stop, Tally, Task, main  # type: ignore[import-not-found,unused-ignore]
from pgqueuer.db import AsyncpgDriver  # type: ignore[import-not-found,unused-ignore]
from pgqueuer.qm import QueueManager  # type: ignore[import-not-found,unused-ignore]
from pgqueuer.queries import Queries  # type: ignore[import-not-found,unused-ignore]

_ENTRYPOINT = "bench"


class PgQueuer:
    """Its queue is a table; there are no lanes."""

    parsed = False

    def __init__(self, task: Task) -> None:
        self._task = task
        logging.disable(logging.CRITICAL)

    async def _connect(self) -> Any:
        return await asyncpg.connect(**self._task["postgres"])

    async def setup(self) -> None:
        """Install its tables."""
        await Queries(AsyncpgDriver(await self._connect())).install()

    async def pusher(self, index: int) -> Push:
        """Connect one producer."""
        queries = Queries(AsyncpgDriver(await self._connect()))

        async def push(messages: list[str], lane: int) -> None:
            payloads = [message.encode() for message in messages]
            if len(payloads) == 1:
                await queries.enqueue(_ENTRYPOINT, payloads[0])
            else:
                await queries.enqueue([_ENTRYPOINT] * len(payloads), payloads, [0] * len(payloads))

        return push

    async def consume(self, tally: Tally) -> Stop:
        """Start the queue managers."""

        async def work(job: Any) -> None:
            if tally.timed:
                tally.received(json.loads(job.payload))
            tally.add(1)

        managers: list[Any] = []
        running: list[asyncio.Task[Any]] = []
        for _ in range(self._task["connections"]):
            manager = QueueManager(Queries(AsyncpgDriver(await self._connect())))
            manager.entrypoint(_ENTRYPOINT)(work)
            managers.append(manager)
            running.append(asyncio.create_task(manager.run(batch_size=self._task["batch"])))

        async def stop() -> None:
            for task in running:
                if task.done() and not task.cancelled() and (problem := task.exception()):
                    tally.error(problem)
            for manager in managers:
                manager.shutdown.set()
            await asyncio.wait(running, timeout=3)

        return stop


main(PgQueuer)
