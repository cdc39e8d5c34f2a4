"""Where groups begin, and how they begin again."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from stage import Stage, collect, error_of, payloads, until

from queen import Queen


async def history(stage: Stage, count: int = 3, queue: str | None = None) -> list[str]:
    """Push messages one by one, and return when each was stored."""
    name = queue or stage.queue
    for n in range(count):
        await stage.client.queue(name).push([{"data": n}])
    messages = await collect(
        stage.client.queue(name).group(f"{name}-clock").subscription_mode("all").batch(count), count
    )
    return [message["createdAt"] for message in messages]


async def begins(stage: Stage) -> Any:
    """Subscribe a group per way of beginning, push once more, and return what each group gets."""
    times = await history(stage)

    def group(name: str) -> Any:
        return stage.client.queue(stage.queue).group(f"{stage.group}-{name}").batch(10)

    groups = {
        "all": group("all").subscription_mode("all"),
        "new": group("new").subscription_mode("new"),
        "unsaid": group("unsaid"),
        "now": group("now").subscription_from("now"),
        "second": group("second").subscription_from(times[1]),
        "future": group("future").subscription_from("2999-01-01T00:00:00Z"),
        "long ago": group("ago").subscription_from("2020-01-01T00:00:00Z"),
    }
    before = {name: payloads(await builder.wait(False).pop()) for name, builder in groups.items()}
    await stage.client.queue(stage.queue).push([{"data": "later"}])
    # A partition that is new to a group belongs to what came after its subscription.
    await stage.client.queue(stage.queue).partition("born").push([{"data": "born"}])
    after = {}
    for name in ("new", "unsaid", "now"):
        got: list[Any] = []
        while len(got) < 2:
            got += await collect(groups[name].partitions(2), 1)
        after[name] = sorted(payloads(got))
    return {"before": before, "after": after}


async def drain(stage: Stage, client: Queen, count: int = 3, queue: str | None = None) -> list[Any]:
    """Have the group get so many messages of the queue through a client, and acknowledge them."""
    builder = client.queue(queue or stage.queue).group(stage.group).subscription_mode("all").batch(10)
    messages = await collect(builder, count, ack=client, group=stage.group)
    assert await stage.lag(queue=queue) == 0
    return payloads(messages)


async def sought(stage: Stage) -> Any:
    """Move a group that is done to the second message, to the beginning, and to the end.

    It consumes through the first broker and is moved through the last, which the first can't know of.
    """
    times = await history(stage)
    near, far = await stage.near(), await stage.far()
    await drain(stage, near)

    async def seek(options: dict[str, Any], count: int) -> Any:
        answer = await far.admin.seek_consumer_group(stage.group, stage.queue, options)
        lag = await stage.lag()
        started = time.monotonic()
        messages = await drain(stage, near, count)
        return [answer["success"], answer["partitionsUpdated"], lag, messages, time.monotonic() - started]

    results = [await seek({"timestamp": times[1]}, 2), await seek({"timestamp": "2020-01-01T00:00:00Z"}, 3)]
    await far.admin.seek_consumer_group(stage.group, stage.queue, {"timestamp": "2020-01-01T00:00:00Z"})
    end = await far.admin.seek_consumer_group(stage.group, stage.queue, {"toEnd": True})
    lag = await stage.lag()
    await near.queue(stage.queue).push([{"data": "after"}])
    after = await drain(stage, near, 1)
    return {
        "moved": [result[:4] for result in results],
        "late": max(result[4] for result in results),
        "end": [end["success"], end["seekToEnd"], lag],
        "after": after,
    }


async def sought_while_waiting(stage: Stage, how: str) -> Any:
    """Move a group back, or delete it, while a pop of it waits at another broker."""
    await history(stage)
    near, far = await stage.near(), await stage.far()
    await drain(stage, near)
    pop = asyncio.create_task(stage.subscribed(near).batch(10).wait(True).timeout_millis(20_000).pop())
    for _ in range(3):
        await near.admin.health()
    started = time.monotonic()
    if how == "seek":
        await far.admin.seek_consumer_group(stage.group, stage.queue, {"timestamp": "2020-01-01T00:00:00Z"})
    else:
        await far.admin.delete_consumer_group_for_queue(stage.group, stage.queue)
    return {"popped": payloads(await pop), "late": time.monotonic() - started}


async def sought_nothing(stage: Stage) -> Any:
    """Seek where there is nothing to seek, and without saying where to."""
    unknown = stage.client.admin.seek_consumer_group(stage.group, stage.queue, {"toEnd": True})
    results = [await error_of(unknown)]
    await stage.client.queue(stage.queue).push([{"data": 1}])
    results.append(await error_of(stage.client.admin.seek_consumer_group(stage.group, stage.queue, {"other": 1})))
    return results


async def deleted(stage: Stage) -> Any:
    """Delete a group on one of its two queues, then on both, and subscribe again each time."""
    other = f"{stage.queue}-other"
    near, far = await stage.near(), await stage.far()
    for queue in (stage.queue, other):
        await history(stage, queue=queue)
        await drain(stage, near, queue=queue)
    one = await far.admin.delete_consumer_group_for_queue(stage.group, stage.queue)
    left = sorted(await stage.client.admin.get_consumer_group(stage.group))
    first = await drain(stage, near)
    both = await far.delete_consumer_group(stage.group)
    gone = await stage.client.admin.get_consumer_group(stage.group)
    second = [await drain(stage, near), await drain(stage, near, queue=other)]
    none = await far.delete_consumer_group(f"{stage.group}-unknown")
    return {
        "one": [one["success"], one["deletedPartitions"]],
        "left": left == [other],
        "first": first,
        "both": [both["success"], both["deletedPartitions"], both["metadataDeleted"]],
        "gone": gone,
        "second": second,
        "none": [none["success"], none["deletedPartitions"]],
    }


async def from_now_on(stage: Stage) -> Any:
    """Delete a group and subscribe again for new messages alone."""
    await history(stage)
    near = await stage.near()
    await drain(stage, near)
    await (await stage.far()).delete_consumer_group(stage.group)
    builder = stage.subscribed(near, "new").batch(10)

    async def registered() -> bool:
        assert await builder.wait(False).pop() == []
        groups = await stage.client.admin.list_consumer_groups()
        return any(g["name"] == stage.group and g["queueName"] == stage.queue for g in groups)

    await until(registered)
    await near.queue(stage.queue).push([{"data": "new"}])
    return payloads(await collect(builder, 1))


async def moved(stage: Stage) -> Any:
    """Keep a group's registration over its deletion, after moving it back to the second message."""
    times = await history(stage)
    far = await stage.far()
    nothing = await stage.subscribed(mode="new").wait(False).pop()
    updated = await far.update_consumer_group_timestamp(stage.group, times[1])
    deleted = await far.delete_consumer_group(stage.group, delete_metadata=False)
    # What the next pop asks for doesn't count: the registration stands.
    messages = await collect(stage.subscribed(mode="new").batch(10), 2)
    return {
        "nothing": nothing,
        "updated": [updated["success"], updated["rowsUpdated"]],
        "deleted": [deleted["deletedPartitions"], deleted["metadataDeleted"]],
        "popped": payloads(messages),
    }
