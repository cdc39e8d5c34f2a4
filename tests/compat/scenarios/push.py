"""Pushes in all the shapes the client takes."""

from __future__ import annotations

import asyncio
from typing import Any

from stage import Stage, by_partition, collect, payloads


async def shapes(stage: Stage, items: list[Any]) -> Any:
    """Push each item by itself, then all of them as one array; return the answers and what is popped."""
    queue = stage.client.queue(stage.queue)
    singles = [await queue.partition("single").push(item) for item in items]
    array = await queue.partition("array").push(items)
    popped = await collect(stage.client.queue(stage.queue).batch(100).partitions(2), 2 * len(items))
    return {"singles": singles, "array": array, "popped": by_partition(popped)}


async def ids(stage: Stage) -> Any:
    """Push messages with and without a transaction id, and return them popped."""
    queue = stage.client.queue(stage.queue)
    pushed = await queue.push([{"data": 0}, {"data": 1, "transactionId": "mine"}, {"data": 2}])
    popped = await collect(queue.batch(10), 3)
    return {"pushed": pushed, "popped": popped}


async def duplicates(stage: Stage) -> Any:
    """Push one transaction id several times: alone, within an array, to another partition and queue."""
    queue = stage.client.queue(stage.queue)

    def item(key: str, data: Any) -> dict[str, Any]:
        return {"transactionId": key, "data": data}

    pushed = [
        await queue.push([item("a", 1)]),
        await queue.push([item("a", 2)]),
        await (await stage.far()).queue(stage.queue).push([item("a", 3), item("b", 4), item("b", 5), item("c", 6)]),
        await stage.client.queue(stage.queue).partition("other").push([item("a", 7)]),
        await stage.client.queue(f"{stage.queue}-other").push([item("a", 8)]),
    ]
    popped = await collect(stage.client.queue(stage.queue).batch(100).partitions(2), 4)
    other = await collect(stage.client.queue(f"{stage.queue}-other").batch(100), 1)
    total = await stage.total()
    return {"pushed": pushed, "popped": by_partition(popped), "other": payloads(other), "total": total}


async def callbacks(stage: Stage) -> Any:
    """Push one new message and one known, with all callbacks."""
    events: dict[str, list[Any]] = {"success": [], "duplicate": [], "error": []}

    def note(kind: str) -> Any:
        async def callback(items: list[dict[str, Any]], *_: Any) -> None:
            events[kind] += [(item["transactionId"], item["result"]["status"]) for item in items]

        return callback

    queue = stage.client.queue(stage.queue)
    await queue.push([{"transactionId": "old", "data": 1}])
    push = queue.push([{"transactionId": "old", "data": 1}, {"transactionId": "new", "data": 2}])
    await push.on_success(note("success")).on_duplicate(note("duplicate")).on_error(note("error"))
    return events


async def rivals(stage: Stage, count: int) -> Any:
    """Push the same transaction ids from several clients at once; return statuses and ids per key."""
    clients = [await stage.near(), await stage.far(), await stage.near(), await stage.far()]
    items = [{"transactionId": f"t{n}", "data": n} for n in range(count)]
    answers = await asyncio.gather(*(client.queue(stage.queue).push(items) for client in clients))
    popped = await collect(stage.client.queue(stage.queue).batch(count * 10), count)
    return {
        "total": await stage.total(),
        "statuses": [sorted(answer[n]["status"] for answer in answers) for n in range(count)],
        "ids": [len({answer[n]["message_id"] for answer in answers}) for n in range(count)],
        "popped": payloads(popped),
    }


async def bulk(stage: Stage, count: int) -> Any:
    """Push many messages in one call, and pop them in calls of another size."""
    pushed = await stage.client.queue(stage.queue).push([{"data": {"n": n, "pad": "x" * 100}} for n in range(count)])
    popped = await collect(stage.client.queue(stage.queue).batch(count // 2), count, ack=stage.client)
    return {
        "queued": sum(item["status"] == "queued" for item in pushed),
        "numbers": [message["data"]["n"] for message in popped],
    }


async def buffered(stage: Stage, count: int, options: dict[str, int], flush: str) -> Any:
    """Push through the client's buffer and return what arrives, in order."""
    answers = [
        await stage.client.queue(stage.queue).partition("p").buffer(options).push([{"data": n}]) for n in range(count)
    ]
    before = stage.client.get_buffer_stats()["totalBufferedMessages"]
    if flush == "queue":
        await stage.client.queue(stage.queue).partition("p").flush_buffer()
    elif flush == "all":
        await stage.client.flush_all_buffers()
    popper = stage.client.queue(stage.queue).partition("p").batch(count)
    arrived = await collect(popper, count, ack=stage.client)
    stats = stage.client.get_buffer_stats()
    return {
        "buffered": all(answer.get("buffered") for answer in answers),
        "before": before,
        "arrived": payloads(arrived),
        "total": await stage.total(),
        "left": stats["totalBufferedMessages"],
    }


async def buffered_at_close(stage: Stage) -> Any:
    """Push through a buffer, close the client, and pop with another."""
    client = await stage.near()
    for n in range(5):
        await client.queue(stage.queue).buffer({"message_count": 1000, "time_millis": 60000}).push([{"data": n}])
    await client.close()
    return payloads(await collect((await stage.far()).queue(stage.queue).batch(10), 5))
