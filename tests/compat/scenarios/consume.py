"""Consumers: handlers in a loop, in groups, with concurrency."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from stage import Stage, collect, consuming, payloads, until


class Recorder:
    """Handles messages and remembers them, per partition, and whether a partition was handled twice at once."""

    def __init__(self) -> None:
        self.handled: dict[str, list[Any]] = {}
        self.calls: list[str] = []
        self.overlaps = 0
        self._busy: set[str] = set()

    @property
    def count(self) -> int:
        return sum(map(len, self.handled.values()))

    async def __call__(self, given: Any) -> None:
        self.calls.append(type(given).__name__)
        messages = given if isinstance(given, list) else [given]
        partitions = {message["partition"] for message in messages}
        self.overlaps += len(partitions & self._busy)
        self._busy |= partitions
        for message in messages:
            await asyncio.sleep(0)
            self.handled.setdefault(message["partition"], []).append(message["data"])
        self._busy -= partitions


async def push(stage: Stage, partitions: int, each: int) -> None:
    """Push numbered messages to several partitions at once."""
    await asyncio.gather(
        *(
            stage.client.queue(stage.queue).partition(f"p{p}").push([{"data": n} for n in range(each)])
            for p in range(partitions)
        )
    )


async def handled(stage: Stage, batch: int, each: bool, concurrency: int, sweep: int) -> Any:
    """Consume eight partitions of four messages with one consumer."""
    await push(stage, 8, 4)
    recorder = Recorder()
    builder = stage.subscribed().batch(batch).partitions(sweep).concurrency(concurrency)
    if each:
        builder.each()

    async def done() -> bool:
        return recorder.count >= 32 and await stage.lag() == 0

    async with consuming(builder.consume(recorder)):
        await until(done, 20)
    return {
        "handled": recorder.handled,
        "overlaps": recorder.overlaps,
        "given": sorted(set(recorder.calls)),
        "calls": len(recorder.calls),
    }


async def shared(stage: Stage) -> Any:
    """Consume as one group with a consumer on every broker, and as another group by itself."""
    await push(stage, 8, 4)
    recorder, other = Recorder(), Recorder()

    def builder(client: Any, group: str) -> Any:
        return client.queue(stage.queue).group(group).subscription_mode("all").batch(2).partitions(1)

    consumers = [
        builder(await stage.near(), stage.group).concurrency(2).consume(recorder),
        builder(await stage.far(), stage.group).concurrency(2).consume(recorder),
        builder(stage.client, f"{stage.group}-other").consume(other),
    ]

    async def done() -> bool:
        enough = recorder.count >= 32 and other.count >= 32
        return enough and await stage.lag() == await stage.lag(f"{stage.group}-other") == 0

    async with consuming(*consumers):
        await until(done, 20)
    return {
        "shared": recorder.handled,
        "overlaps": recorder.overlaps,
        "other": other.handled,
    }


async def live(stage: Stage, count: int) -> Any:
    """Push through one broker, message after message, while a consumer waits at another."""
    await stage.client.queue(stage.queue).create()
    recorder = Recorder()
    near, far = await stage.near(), await stage.far()
    latencies = []
    async with consuming(stage.subscribed(near).concurrency(2).consume(recorder)):
        for n in range(count):
            started = time.monotonic()
            await far.queue(stage.queue).push([{"data": n}])

            async def arrived(wanted: int = n + 1) -> bool:
                return recorder.count >= wanted

            await until(arrived)
            latencies.append(time.monotonic() - started)
    return {"handled": recorder.handled, "latencies": latencies}


async def retried(stage: Stage) -> Any:
    """Consume with a handler that fails at its first sight of one message in the middle of a batch."""
    await push(stage, 1, 5)
    seen: list[int] = []

    async def handler(message: dict[str, Any]) -> None:
        seen.append(message["data"])
        if message["data"] == 2 and seen.count(2) == 1:
            raise ValueError("not yet")

    async def done() -> bool:
        return 4 in seen and await stage.lag() == 0

    async with consuming(stage.subscribed().batch(5).partitions(1).each().consume(handler)):
        await until(done)
    return {"seen": seen, "dead": (await stage.client.queue(stage.queue).dlq().get())["total"]}


async def poison(stage: Stage, limit: int) -> Any:
    """Consume with a handler that always fails on one message."""
    await stage.client.queue(stage.queue).config({"retryLimit": limit}).create()
    await push(stage, 1, 3)
    seen: list[int] = []

    async def handler(message: dict[str, Any]) -> None:
        seen.append(message["data"])
        if message["data"] == 1:
            raise ValueError("never")

    async def done() -> bool:
        return 2 in seen and await stage.lag() == 0

    async with consuming(stage.subscribed().batch(3).partitions(1).each().consume(handler)):
        await until(done)
    return {"seen": seen, "dead": await stage.client.queue(stage.queue).dlq(stage.group).get()}


async def batch_failure(stage: Stage, limit: int) -> Any:
    """Consume with a handler that fails on its whole batch, as often as it takes."""
    await stage.client.queue(stage.queue).config({"retryLimit": limit}).create()
    await push(stage, 1, 2)
    calls: list[Any] = []

    async def handler(messages: list[dict[str, Any]]) -> None:
        calls.append(payloads(messages))
        raise ValueError(f"call {len(calls)}")

    async def done() -> bool:
        return bool(calls) and await stage.lag() == 0

    async with consuming(stage.subscribed().batch(2).partitions(1).consume(handler)):
        await until(done)
    dead = await stage.client.queue(stage.queue).dlq().get()
    return {"calls": calls, "dead": [(letter["data"], letter["errorMessage"]) for letter in dead["messages"]]}


async def by_hand(stage: Stage) -> Any:
    """Consume without the client's own acks, and acknowledge every second message in the handler."""
    await push(stage, 1, 4)
    seen: list[int] = []
    lags: list[int] = []

    async def handler(message: dict[str, Any]) -> None:
        seen.append(message["data"])
        if message["data"] % 2:
            await stage.client.ack(message, True, {"group": stage.group})
            lags.append(await stage.lag())

    builder = stage.subscribed().batch(4).partitions(1).each().auto_ack(False)

    async def done() -> bool:
        return len(lags) == 2 and await stage.lag() == 0

    async with consuming(builder.consume(handler)):
        await until(done)
    return {"seen": seen, "lags": lags}


async def endings(stage: Stage) -> Any:
    """End consumers by limit, by signal and by idleness."""
    await push(stage, 1, 6)
    # With one broker for everything, idle means that there is nothing: news needs no time to come around.
    client = await stage.near()
    seen: list[int] = []
    stop = asyncio.Event()

    async def handler(message: dict[str, Any]) -> None:
        seen.append(message["data"])
        if len(seen) == 5:
            stop.set()

    def builder() -> Any:
        return stage.subscribed(client).batch(1).partitions(1).each()

    await builder().limit(3).consume(handler)
    limited = [list(seen), await stage.lag()]
    await builder().consume(handler, signal=stop)
    signalled = [list(seen), await stage.lag()]
    await builder().timeout_millis(200).idle_millis(300).consume(handler)
    return {"limit": limited, "signal": signalled, "idle": [list(seen), await stage.lag()]}


async def labels(stage: Stage) -> Any:
    """Consume all queues of a namespace while messages come to each of them."""
    names = [f"{stage.queue}-{n}" for n in range(3)]
    for name in names:
        await stage.client.queue(name).namespace(stage.queue).create()
    seen: list[str] = []

    async def handler(message: dict[str, Any]) -> None:
        seen.append(message["data"])

    builder = stage.client.queue().namespace(stage.queue).group(stage.group).subscription_mode("all")
    async with consuming(builder.batch(10).partitions(3).each().consume(handler)):
        for turn in range(2):
            for name in names:
                await stage.client.queue(name).push([{"data": f"{name[-1]}/{turn}"}])

        async def done() -> bool:
            lags = [await stage.lag(queue=name) for name in names] if len(seen) >= 6 else [1]
            return sum(lags) == 0

        await until(done)
    return sorted(seen)


async def deserters(stage: Stage, count: int) -> Any:
    """Cancel consumers that wait, push, and consume the messages with another one."""
    await stage.client.queue(stage.queue).create()
    near, far = await stage.near(), await stage.far()
    recorder = Recorder()
    parked = [stage.subscribed(client).consume(recorder) for client in [near, far] * count]
    async with consuming(*parked):
        # The group is known once one of them was served; all of them are parked soon after.
        async def registered() -> bool:
            groups = await stage.client.admin.list_consumer_groups()
            return any(group["name"] == stage.group for group in groups)

        await stage.client.queue(stage.queue).push([{"data": "first"}])
        await until(registered)

        async def first() -> bool:
            return recorder.count == 1 and await stage.lag() == 0

        await until(first)
    await stage.client.queue(stage.queue).push([{"data": n} for n in range(3)])
    started = time.monotonic()
    messages = await collect(stage.subscribed().batch(3), 3)
    return {"deserters": recorder.handled, "popped": payloads(messages), "late": time.monotonic() - started}
