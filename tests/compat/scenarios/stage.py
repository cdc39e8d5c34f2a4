"""What a scenario is given: clients of the brokers, and names nobody else uses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from queen import Queen

T = TypeVar("T")


class Stage:
    """The brokers of one scenario, and a queue name of its own."""

    def __init__(self, urls: list[str], name: str) -> None:
        self.urls = urls
        self.queue = name
        self.group = f"{name}-group"
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> Stage:
        # The client that most scenarios use knows all brokers, and spreads its requests over them.
        self.client = await self.connect(*self.urls)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._exits.aclose()

    async def connect(self, *urls: str) -> Queen:
        """Return one more client, of these brokers; it is closed at the end."""
        client = Queen(list(urls))
        self._exits.push_async_callback(client.close)
        return client

    async def near(self) -> Queen:
        """Return a client that knows only the first broker."""
        return await self.connect(self.urls[0])

    async def far(self) -> Queen:
        """Return a client that knows only the last broker: another one, where there are two."""
        return await self.connect(self.urls[-1])

    async def lag(self, group: str | None = None, queue: str | None = None) -> int:
        """Return how many messages a group has not acknowledged, as the database has it."""
        cursors = await self.client.admin.get_consumer_group(group or self.group)
        return sum(partition["offsetLag"] for partition in cursors[queue or self.queue]["partitions"])

    async def total(self, queue: str | None = None) -> int:
        """Return how many messages a queue holds, as the database has it."""
        detail = await self.client.admin.get_queue(queue or self.queue)
        total: int = detail["totals"]["total"]
        return total

    def subscribed(self, client: Queen | None = None, mode: str = "all") -> Any:
        """Return a builder for this scenario's queue and group."""
        return (client or self.client).queue(self.queue).group(self.group).subscription_mode(mode)


async def until(condition: Callable[[], Awaitable[T]], seconds: float = 10.0) -> T:
    """Await a condition again and again until it is true, and return what it was."""
    deadline = time.monotonic() + seconds
    while not (value := await condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s")
        await asyncio.sleep(0.02)
    return value


async def collect(pop: Any, count: int, ack: Queen | None = None, group: str | None = None) -> list[dict[str, Any]]:
    """Pop with a queue builder, waiting, until so many messages came; acknowledge each batch with a client.

    One pop may bring less than there is: it claims what its broker knows of, and that a little later than
    another broker does.
    """
    messages: list[dict[str, Any]] = []

    async def enough() -> bool:
        batch = await pop.wait(True).timeout_millis(3000).pop()
        if ack is not None and batch:
            await ack.ack(batch, True, {"group": group} if group else None)
        messages.extend(batch)
        return len(messages) >= count

    await until(enough)
    return messages


@asynccontextmanager
async def consuming(*consumers: Any) -> AsyncIterator[None]:
    """Run consumers in the background of a block; they are cancelled at its end, and may not fail before."""

    async def run(consumer: Any) -> None:
        await consumer

    tasks = [asyncio.create_task(run(consumer)) for consumer in consumers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if not isinstance(result, asyncio.CancelledError):
            raise AssertionError(f"a consumer ended by itself: {result!r}")


async def error_of(call: Awaitable[Any]) -> str:
    """Return the message of what a call raises. It is an error that it raises nothing."""
    try:
        result = await call
    except Exception as error:
        return str(error)
    raise AssertionError(f"no error, but {result!r}")


def payloads(messages: list[dict[str, Any]]) -> list[Any]:
    """Return what was pushed, in the order of the messages."""
    return [message["data"] for message in messages]


def by_partition(messages: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return what was pushed, per partition, in the order of the messages."""
    partitions: dict[str, list[Any]] = {}
    for message in messages:
        partitions.setdefault(message["partition"], []).append(message["data"])
    return partitions
