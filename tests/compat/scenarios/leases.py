"""Leases: how they end, and how they are renewed."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from stage import Stage, collect, consuming, payloads, until


async def push(stage: Stage, partitions: str = "a") -> None:
    """Push a message to each partition of a queue whose leases last one second."""
    await stage.client.queue(stage.queue).config({"leaseTime": 1}).create()
    for partition in partitions:
        await stage.client.queue(stage.queue).partition(partition).push([{"data": partition}])


async def expired(stage: Stage) -> Any:
    """Let a lease end, have the message popped through another broker, and acknowledge both deliveries."""
    await push(stage)
    (first,) = await collect(stage.subscribed(await stage.near()), 1)
    started = time.monotonic()
    (second,) = await stage.subscribed(await stage.far()).wait(True).timeout_millis(10_000).pop()
    late = time.monotonic() - started
    context = {"group": stage.group}
    old = await stage.client.ack(first, True, context)
    lag = await stage.lag()
    new = await stage.client.ack(second, True, context)
    return {
        "same": first["id"] == second["id"] and first["leaseId"] != second["leaseId"],
        "late": late,
        "old": [old["success"], old["error"]],
        "lag": lag,
        "new": new["success"],
        "dead": (await stage.client.queue(stage.queue).dlq().get())["total"],
    }


async def renewed(stage: Stage, by: str) -> Any:
    """Renew two leases through another broker, and offer their messages to a rival past their first end."""
    await push(stage, "ab")
    near = await stage.near()
    messages = []
    for partition in "ab":
        builder = near.queue(stage.queue).partition(partition).group(stage.group).subscription_mode("all")
        messages += await collect(builder, 1)
    far = await stage.far()
    if by == "id":
        answers = [await far.renew(message["leaseId"]) for message in messages]
    elif by == "message":
        answers = [await far.renew(message) for message in messages]
    else:
        answers = await far.renew(messages)
    rival = await stage.subscribed(near).batch(2).partitions(2).wait(True).timeout_millis(1700).pop()
    acks = [await stage.client.ack(message, True, {"group": stage.group}) for message in messages]
    return {
        "renewed": [(answer["leaseId"], answer["success"], bool(answer["newExpiresAt"])) for answer in answers],
        "leases": [message["leaseId"] for message in messages],
        "rival": rival,
        "acked": [ack["success"] for ack in acks],
        "lag": await stage.lag(),
    }


async def too_late(stage: Stage) -> Any:
    """Renew a lease that ended and is another's now, and one that never was."""
    await push(stage)
    (first,) = await collect(stage.subscribed(), 1)
    (second,) = await stage.subscribed().wait(True).timeout_millis(10_000).pop()
    answers = [await stage.client.renew(lease) for lease in (first, "no such lease")]
    acked = await stage.client.ack(second, True, {"group": stage.group})
    return {"expiries": [answer["newExpiresAt"] for answer in answers], "acked": acked["success"]}


async def automatic(stage: Stage, renew: bool, sweep: int) -> Any:
    """Consume with a handler that outlasts the lease, while a rival asks for the same messages."""
    partitions = "abc"[:sweep]
    await push(stage, partitions)
    rival = await stage.far()
    handled: list[Any] = []
    offered: list[Any] = []
    asked = asyncio.Event()

    async def handler(messages: list[dict[str, Any]]) -> None:
        handled.extend(payloads(messages))
        builder = stage.subscribed(rival).batch(10).partitions(sweep).wait(True).timeout_millis(2500)
        if not asked.is_set():
            offered.extend(payloads(await builder.pop()))
            asked.set()

    builder = stage.subscribed().batch(10).partitions(sweep).limit(len(partitions))
    if renew:
        builder.renew_lease(True, 300)
    async with consuming(_forever(builder.consume(handler))):
        await asyncio.wait_for(asked.wait(), 20)
        if renew:

            async def done() -> bool:
                return await stage.lag() == 0

            await until(done)
    return {"handled": sorted(handled), "offered": sorted(offered)}


async def _forever(consumer: Any) -> None:
    await consumer
    await asyncio.Event().wait()
