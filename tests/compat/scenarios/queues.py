"""Queues and their settings."""

from __future__ import annotations

from typing import Any

from stage import Stage, by_partition, collect, error_of, payloads


async def configure(stage: Stage, first: dict[str, Any], second: dict[str, Any]) -> Any:
    """Create a queue, look at it, and create it again with other settings."""
    queue = stage.client.queue(stage.queue).namespace("shop").task("bill")
    created = await queue.config(first).create()
    seen = await (await stage.far()).admin.get_queue(stage.queue)
    again = await queue.config(second).create()
    return {"created": created, "seen": seen, "again": again}


async def callbacks(stage: Stage) -> Any:
    """Create and delete with callbacks in place of results."""
    events: list[Any] = []

    async def done(answer: dict[str, Any]) -> None:
        events.append(answer["queue"])

    async def failed(error: Exception) -> None:
        events.append(str(error))

    queue = stage.client.queue(stage.queue)
    await queue.create().on_success(done).on_error(failed)
    await queue.delete().on_success(done).on_error(failed)
    return events


async def delete(stage: Stage) -> Any:
    """Delete a queue that has messages, a group and a dead letter; then use its name again."""
    queue = stage.client.queue(stage.queue)
    await queue.create()
    await queue.push([{"data": n, "transactionId": f"t{n}"} for n in range(3)])
    taken = await collect(stage.subscribed().batch(3), 3)
    await stage.client.ack(taken[0], "dlq", {"group": stage.group})
    dead = (await stage.client.queue(stage.queue).dlq().get())["total"]
    far = await stage.far()
    deleted = await far.queue(stage.queue).delete()
    missing = await error_of(stage.client.admin.get_queue(stage.queue))
    again = await far.queue(stage.queue).delete()
    pushed = await stage.client.queue(stage.queue).push([{"data": "new", "transactionId": "t0"}])
    popped = await collect(stage.subscribed().batch(10), 1)
    return {
        "dead before": dead,
        "deleted": deleted,
        "missing": missing,
        "again": again,
        "status": pushed[0]["status"],
        "popped": payloads(popped),
        "dead": (await stage.client.queue(stage.queue).dlq().get())["total"],
    }


async def overview(stage: Stage) -> Any:
    """Look at a queue with two partitions, one half consumed, in listing and detail."""
    queue = stage.client.queue(stage.queue)
    await queue.namespace("shop").create()
    await queue.partition("a").push([{"data": n} for n in range(4)])
    await queue.partition("b").push([{"data": n} for n in range(2)])
    taken = await collect(stage.client.queue(stage.queue).partition("a").batch(3), 3)
    await stage.client.ack(taken[:2], True)
    far = await stage.far()
    listed = (await far.admin.list_queues())["queues"]
    return {
        "listed": [entry for entry in listed if entry["name"] == stage.queue],
        "detail": await far.admin.get_queue(stage.queue),
    }


async def names(stage: Stage, suffix: str, partition: str, group: str) -> Any:
    """Take a message through its life in a queue, partition and group with unusual names."""
    name = stage.queue + suffix
    await stage.client.queue(name).create()
    await stage.client.queue(name).partition(partition).push([{"data": 1, "transactionId": group}])
    pop = stage.client.queue(name).partition(partition).group(group).subscription_mode("all")
    messages = await collect(pop, 1)
    acked = await stage.client.ack(messages, True, {"group": group})
    seen = await stage.client.admin.get_queue(name)
    consumed = await stage.client.admin.get_consumer_group(group)
    deleted = await stage.client.queue(name).delete()
    return {
        "popped": by_partition(messages),
        "transactionId": messages[0]["transactionId"],
        "acked": [result["success"] for result in acked["results"]],
        "partitions": [entry["name"] for entry in seen["partitions"]],
        "lag": consumed[name]["partitions"][0]["offsetLag"],
        "deleted": deleted["deleted"],
    }
