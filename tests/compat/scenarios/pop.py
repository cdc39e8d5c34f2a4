"""Pops: which messages a call gets, and how long it waits for them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from stage import Stage, by_partition, collect, payloads


async def fill(stage: Stage, partitions: dict[str, int]) -> None:
    """Push numbered messages to partitions."""
    for partition, count in partitions.items():
        await stage.client.queue(stage.queue).partition(partition).push([{"data": n} for n in range(count)])


async def pinned(stage: Stage) -> Any:
    """Pop one partition of two, more than it holds, and again while the first batch is leased."""
    await fill(stage, {"a": 3, "b": 3})
    first = await collect(stage.client.queue(stage.queue).partition("b").batch(10), 3)
    near = await (await stage.near()).queue(stage.queue).partition("b").batch(10).wait(False).pop()
    far = await (await stage.far()).queue(stage.queue).partition("b").batch(10).wait(False).pop()
    return {"first": by_partition(first), "again": [near, far]}


async def budget(stage: Stage) -> Any:
    """Pop from three partitions at most two at a time and at most five messages."""
    await fill(stage, {"a": 3, "b": 3, "c": 3})
    queue = (await stage.near()).queue(stage.queue).batch(5).partitions(2)
    batches = []
    while sum(map(len, batches)) < 9:
        batch = await queue.wait(True).timeout_millis(3000).pop()
        batches.append(batch)
        await stage.client.ack(batch, True)
    return [
        {
            "messages": by_partition(batch),
            "leases": len({message["leaseId"] for message in batch}),
            "ids": len({message["partitionId"] for message in batch}),
        }
        for batch in batches
    ]


async def sequence(stage: Stage, count: int) -> Any:
    """Pop and acknowledge through all brokers in turn, batch by batch, while the queue still fills."""
    clients = [await stage.near(), await stage.far()]
    popped: list[Any] = []
    for n in range(count):
        await clients[n % 2].queue(stage.queue).push([{"data": 2 * n}, {"data": 2 * n + 1}])
        if n % 3 == 2:
            popped += await collect(clients[n // 3 % 2].queue(stage.queue).batch(4), 4, ack=clients[n // 3 % 2 - 1])
    while len(popped) < 2 * count:
        popped += await collect(stage.client.queue(stage.queue).batch(5), 1, ack=stage.client)
    return payloads(popped)


async def exclusive(stage: Stage) -> Any:
    """Pop as one group twice, and as another group, while the first batch is leased."""
    await fill(stage, {"a": 4})
    one = stage.subscribed().batch(2)
    first = await collect(one, 2)
    rivals = []
    for client in (await stage.near(), await stage.far()):
        rivals += await stage.subscribed(client).batch(2).wait(False).pop()
    other = stage.client.queue(stage.queue).group(f"{stage.group}-other").subscription_mode("all").batch(2)
    second = await collect(other, 2)
    return {
        "first": payloads(first),
        "rivals": rivals,
        "other": payloads(second),
        "leases": first[0]["leaseId"] != second[0]["leaseId"],
        "groups": [first[0]["consumerGroup"] == stage.group, second[0]["consumerGroup"] == f"{stage.group}-other"],
    }


async def nothing(stage: Stage, millis: int) -> Any:
    """Pop an unknown queue, an unknown partition and an empty queue, without waiting and waiting in vain."""
    await stage.client.queue(stage.queue).create()
    builders = [
        stage.client.queue(f"{stage.queue}-unknown"),
        stage.client.queue(f"{stage.queue}-unknown").partition("p"),
        stage.client.queue(stage.queue),
        stage.client.queue(stage.queue).partition("p"),
        stage.subscribed(),
    ]
    results = []
    for builder in builders:
        for wait in (False, True):
            started = time.monotonic()
            messages = await builder.wait(wait).timeout_millis(millis).pop()
            results.append({"messages": messages, "waited": time.monotonic() - started if wait else None})
    return results


async def wakes(stage: Stage, shape: str, count: int) -> Any:
    """Park a pop on one broker and push through another, several times; return what came and how late."""
    await stage.client.queue(stage.queue).namespace(stage.queue).create()
    near, far = await stage.near(), await stage.far()

    def builder() -> Any:
        if shape == "pinned":
            return near.queue(stage.queue).partition("p")
        if shape == "discovery":
            return near.queue().namespace(stage.queue)
        return near.queue(stage.queue)

    results = []
    for n in range(count):
        # The first round is the first contact of all; later ones meet a broker that knows the queue.
        pop = asyncio.create_task(builder().batch(10).wait(True).timeout_millis(10_000).pop())
        # Whether it is parked yet can't be seen from outside. Requests that are answered after it was
        # sent make it likely, and the result must be the same when it isn't.
        for _ in range(3):
            await near.admin.health()
        started = time.monotonic()
        await far.queue(stage.queue).partition("p").push([{"data": n}])
        messages = await pop
        results.append({"data": payloads(messages), "late": time.monotonic() - started})
        await stage.client.ack(messages, True)
    return results


async def released(stage: Stage, how: str) -> Any:
    """Park a pop on a partition that is leased, and end the lease through another broker."""
    await fill(stage, {"p": 2})
    near, far = await stage.near(), await stage.far()
    first = await collect(stage.subscribed(near), 1)
    first = first[:1] if how == "nack" else first
    pop = asyncio.create_task(stage.subscribed(near).batch(1).wait(True).timeout_millis(10_000).pop())
    for _ in range(3):
        await near.admin.health()
    if len(first) == 2:  # a client that lets the broker choose the batch got both
        await far.queue(stage.queue).partition("p").push([{"data": 2}])
    started = time.monotonic()
    acked = await far.ack(first, how == "ack", {"group": stage.group})
    messages = await pop
    return {
        "first": payloads(first),
        "acked": acked["success"],
        "then": payloads(messages),
        "late": time.monotonic() - started,
    }


async def labels(stage: Stage) -> Any:
    """Pop by namespace, by task and by both, as groups of their own."""
    space, task = f"{stage.queue}-space", f"{stage.queue}-task"
    for suffix, namespace, job in (("1", space, task), ("2", space, "other"), ("3", "other", task)):
        name = f"{stage.queue}-{suffix}"
        await stage.client.queue(name).namespace(namespace).task(job).create()
        await stage.client.queue(name).push([{"data": suffix}])
    # A queue made by a push is labelled by the first two words of its name.
    await stage.client.queue(f"{space}.{task}.4").push([{"data": "4"}])

    async def found(group: str, count: int, **chosen: str) -> Any:
        builder = stage.client.queue().group(f"{stage.group}-{group}").subscription_mode("all").batch(10).partitions(10)
        for label, value in chosen.items():
            getattr(builder, label)(value)
        messages = await collect(builder, count)
        acked = await stage.client.ack(messages, True, {"group": f"{stage.group}-{group}"})
        again = await builder.wait(False).pop()
        return {
            "data": sorted(payloads(messages)),
            "acked": [result["success"] for result in acked["results"]],
            "again": again,
        }

    return {
        "namespace": await found("n", 3, namespace=space),
        "task": await found("t", 3, task=task),
        "both": await found("b", 2, namespace=space, task=task),
        "neither": await stage.client.queue().namespace(space).task("nobody's").wait(False).pop(),
    }
