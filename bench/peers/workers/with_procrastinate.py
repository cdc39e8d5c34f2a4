"""procrastinate: a job queue in PostgreSQL. A worker fetches jobs one by one, `concurrency` at a time."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from harness import Push, Stop, Tally, Task, main  # type: ignore[import-not-found,unused-ignore]
from procrastinate import App, PsycopgConnector  # type: ignore[import-not-found,unused-ignore]


class Procrastinate:
    """Its queue is a table; its locks, which could serve as lanes, are left out: they slow it down."""

    parsed = True

    def __init__(self, task: Task) -> None:
        self._task = task
        self._tally: Tally | None = None
        self._open = False
        logging.disable(logging.CRITICAL)
        size = task["connections"] + 1  # one of a worker's only listens
        self._app = App(connector=PsycopgConnector(conninfo=task["conninfo"], min_size=size, max_size=size))
        self._job = self._app.task(name="bench")(self._work)

    async def _work(self, message: dict[str, Any]) -> None:
        assert self._tally
        if self._tally.timed:
            self._tally.received(message)
        self._tally.add(1)

    async def _start(self) -> None:
        if not self._open:
            self._open = True
            await self._app.open_async()

    async def setup(self) -> None:
        """Install its tables."""
        await self._start()
        await self._app.schema_manager.apply_schema_async()
        await self._app.close_async()

    async def pusher(self, index: int) -> Push:
        """A producer; the pool has a connection for each."""
        await self._start()

        async def push(messages: list[dict[str, Any]], lane: int) -> None:
            if len(messages) == 1:
                await self._job.defer_async(message=messages[0])
            else:
                await self._job.batch_defer_async(*({"message": message} for message in messages))

        return push

    async def consume(self, tally: Tally) -> Stop:
        """Start one worker that runs as many jobs at once as there are connections, or a batch of them."""
        self._tally = tally
        await self._start()
        worker = self._app.run_worker_async(
            concurrency=max(self._task["connections"], self._task["batch"]), install_signal_handlers=False
        )
        running = asyncio.ensure_future(worker)

        async def stop() -> None:
            if running.done() and (problem := running.exception()):
                tally.error(problem)
            running.cancel()
            await asyncio.wait([running], timeout=3)

        return stop


main(Procrastinate)
