"""Transactions: acks and pushes, all or nothing."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from stage import Stage, by_partition, collect, error_of, payloads


async def push(stage: Stage, partitions: str = "a", count: int = 1) -> None:
    """Push numbered messages to partitions."""
    for partition in partitions:
        await stage.client.queue(stage.queue).partition(partition).push([{"data": n} for n in range(count)])


async def forward(stage: Stage) -> Any:
    """Acknowledge a message without group and push two results to another queue."""
    await push(stage)
    (message,) = await collect((await stage.near()).queue(stage.queue), 1)
    far = await stage.far()
    output = far.transaction().ack(message).queue(f"{stage.queue}-out").partition("p")
    answer = await output.push([{"data": "x", "transactionId": "x1"}, {"data": "y"}]).commit()
    out = await collect(stage.client.queue(f"{stage.queue}-out").batch(10), 2)
    return {
        "success": answer["success"],
        "results": [(r["index"], r["type"], r["success"]) for r in answer["results"]],
        "ids": [r["transactionId"] for r in answer["results"]]
        == [message["transactionId"], "x1", out[1]["transactionId"]],
        "messageIds": [r["messageId"] for r in answer["results"][1:]] == [m["id"] for m in out],
        "out": by_partition(out),
        "lag": await stage.lag("__QUEUE_MODE__"),
    }


async def several(stage: Stage) -> Any:
    """Acknowledge messages of three partitions under one lease and push to two queues."""
    await push(stage, "abc", 2)
    messages = []
    while len(messages) < 6:
        messages += await collect(stage.subscribed().batch(6).partitions(3), 1)
    leases = len({message["leaseId"] for message in messages})
    outputs = [f"{stage.queue}-{n}" for n in range(2)]
    transaction = stage.client.transaction()
    for message in messages:
        transaction.ack(message, "completed", {"consumer_group": stage.group})
    for output in outputs:
        transaction.queue(output).partition("p").push([{"data": n} for n in range(3)])
    answer = await transaction.commit()
    popped = [await collect(stage.client.queue(output).batch(10), 3) for output in outputs]
    return {
        "leases": leases,
        "results": [(r["type"], r["success"]) for r in answer["results"]],
        "indexes": [r["index"] for r in answer["results"]],
        "lag": await stage.lag(),
        "out": [payloads(messages) for messages in popped],
    }


async def duplicate(stage: Stage) -> Any:
    """Fail on a transaction id that is taken; then commit the same without it."""
    await push(stage)
    output = f"{stage.queue}-out"
    await stage.client.queue(output).push([{"data": "first", "transactionId": "taken"}])
    (message,) = await collect(stage.subscribed(), 1)

    def transaction(*items: dict[str, Any]) -> Any:
        acks = stage.client.transaction().ack(message, "completed", {"consumer_group": stage.group})
        return acks.queue(output).push(list(items))

    error = await error_of(transaction({"data": "new"}, {"data": "again", "transactionId": "taken"}).commit())
    between = [await stage.lag(), await stage.total(output)]
    answer = await transaction({"data": "new"}).commit()
    return {
        "error": error.startswith("QDUP"),
        "between": between,
        "success": answer["success"],
        "after": [await stage.lag(), await stage.total(output)],
        "out": payloads(await collect(stage.client.queue(output).batch(10), 2)),
    }


async def refused(stage: Stage) -> Any:
    """Fail on acks: of another group, of an unknown message, and under a lease that ended."""
    await stage.client.queue(stage.queue).config({"leaseTime": 1}).create()
    await push(stage)
    output = f"{stage.queue}-out"
    await stage.client.queue(output).create()
    (message,) = await collect(stage.subscribed(), 1)

    async def error(given: dict[str, Any], group: str) -> str:
        acks = stage.client.transaction().ack(given, "completed", {"consumer_group": group})
        return (await error_of(acks.queue(output).push([{"data": 1}]).commit()))[:4]

    errors = [
        await error(message, "nobody"),
        await error({**message, "transactionId": "unknown"}, stage.group),
    ]
    (again,) = await stage.subscribed().wait(True).timeout_millis(10_000).pop()
    errors.append(await error(message, stage.group))
    lag, total = await stage.lag(), await stage.total(output)
    acked = await stage.client.ack(again, True, {"group": stage.group})
    return {"errors": errors, "lag": lag, "total": total, "acked": acked["success"]}


async def pushes(stage: Stage) -> Any:
    """Commit pushes alone, one key twice among them."""
    item = {"data": 1, "transactionId": "k"}
    transaction = stage.client.transaction().queue(stage.queue).push([item, {"data": 2, "transactionId": "k"}])
    answer = await transaction.queue(stage.queue).partition("b").push(item).commit()
    popped = await collect(stage.client.queue(stage.queue).batch(10).partitions(2), 2)
    return {
        "duplicates": [result.get("duplicate", False) for result in answer["results"]],
        "same": answer["results"][0]["messageId"] == answer["results"][1]["messageId"],
        "popped": by_partition(popped),
        "total": await stage.total(),
    }


async def failed(stage: Stage) -> Any:
    """Give a message up inside a transaction, with a push that tells of it."""
    await stage.client.queue(stage.queue).config({"retryLimit": 0}).create()
    await push(stage, count=2)
    messages = await collect(stage.subscribed().batch(2), 2)
    transaction = stage.client.transaction().ack(messages[0], "failed", {"consumer_group": stage.group})
    answer = await transaction.queue(f"{stage.queue}-out").push([{"data": "told"}]).commit()
    rest = await collect(stage.subscribed().batch(2), 1)
    return {
        "success": answer["success"],
        "dlq": answer["results"][0]["dlq"],
        "told": payloads(await collect(stage.client.queue(f"{stage.queue}-out"), 1)),
        "rest": payloads(rest),
        "dead": payloads((await stage.client.queue(stage.queue).dlq().get())["messages"]),
    }


async def woken(stage: Stage) -> Any:
    """Commit a push while pops wait for it on every broker."""
    await stage.client.queue(stage.queue).create()
    clients = [await stage.near(), await stage.far()]
    pops = [
        asyncio.create_task(
            client.queue(stage.queue).group(f"{stage.group}-{n}").subscription_mode("all").timeout_millis(9000).pop()
        )
        for n, client in enumerate(clients)
    ]
    for client in clients * 2:
        await client.admin.health()
    started = time.monotonic()
    await stage.client.transaction().queue(stage.queue).push([{"data": 1}]).commit()
    popped = await asyncio.gather(*pops)
    return {"popped": [payloads(messages) for messages in popped], "late": time.monotonic() - started}
