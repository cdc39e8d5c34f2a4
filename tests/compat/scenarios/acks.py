"""Acknowledgements: successes, failures, dead letters."""

from __future__ import annotations

from typing import Any

from stage import Stage, by_partition, collect, payloads


async def push(stage: Stage, count: int, partition: str = "Default", **config: Any) -> None:
    """Configure the queue and push numbered messages with numbered transaction ids."""
    await stage.client.queue(stage.queue).config(config).create()
    items = [{"data": n, "transactionId": f"t{n}"} for n in range(count)]
    await stage.client.queue(stage.queue).partition(partition).push(items)


async def attempt(stage: Stage, count: int = 1) -> list[dict[str, Any]]:
    """Pop the next messages as this scenario's group."""
    return await collect(stage.subscribed().batch(count), count)


async def singles(stage: Stage) -> Any:
    """Acknowledge a batch one by one through another broker, then once more."""
    await push(stage, 3)
    messages = await collect(stage.subscribed(await stage.near()).batch(3), 3)
    far = await stage.far()
    context = {"group": stage.group}
    results = []
    for message in messages:
        result = await far.ack(message, True, context)
        results.append([result["success"], result["leaseReleased"], result["dlq"], result["noop"], await stage.lag()])
    again = await far.ack(messages[2], True, context)
    without = await far.ack({key: messages[2][key] for key in ("transactionId", "partitionId")}, True, context)
    return {
        "results": results,
        "again": [again["success"], again["error"]],
        "without lease": [without["success"], without["noop"]],
        "left": await stage.subscribed().wait(False).pop(),
    }


async def lists(stage: Stage) -> Any:
    """Acknowledge messages of two partitions in one call, and a part of a batch in another."""
    await push(stage, 3, "a")
    await push(stage, 3, "b")
    messages = await collect(stage.subscribed().batch(6).partitions(2), 6)
    one = [m for m in messages if m["partition"] == "a"]
    two = [m for m in messages if m["partition"] == "b"]
    context = {"group": stage.group}
    first = await stage.client.ack([*one, *two[:1]], True, context)
    lag = await stage.lag()
    rival = await stage.client.queue(stage.queue).partition("b").group(stage.group).wait(False).pop()
    rest = await stage.client.ack(two[1:], True, context)
    return {
        "popped": by_partition(messages),
        "first": [(r["index"], r["transactionId"], r["success"]) for r in first["results"]],
        "lag": lag,
        "rival": rival,
        "rest": [r["success"] for r in rest["results"]],
        "left": await stage.lag(),
    }


async def implied(stage: Stage) -> Any:
    """Acknowledge only the last message of a batch."""
    await push(stage, 3)
    messages = await attempt(stage, 3)
    result = await stage.client.ack(messages[2], True, {"group": stage.group})
    return {"success": result["success"], "released": result["leaseReleased"], "lag": await stage.lag()}


async def other_group(stage: Stage) -> Any:
    """Acknowledge a group's message without naming the group, then as a group that never popped it."""
    await push(stage, 1)
    (message,) = await attempt(stage)
    results = [
        await stage.client.ack(message, True),
        await stage.client.ack(message, True, {"group": "nobody"}),
        await stage.client.ack({**message, "transactionId": "unknown"}, True, {"group": stage.group}),
    ]
    lag = await stage.lag()
    last = await stage.client.ack(message, True, {"group": stage.group})
    return {"refused": [(r["success"], r["error"]) for r in results], "lag": lag, "last": last["success"]}


async def failures(stage: Stage, limit: int) -> Any:
    """Nack one message until it is dead-lettered."""
    await push(stage, 2, retryLimit=limit)
    attempts = []
    while (messages := await attempt(stage))[0]["data"] == 0:
        result = await stage.client.ack(messages[0], False, {"group": stage.group, "error": f"no {len(attempts) + 1}"})
        attempts.append([result["success"], result["leaseReleased"], result["dlq"]])
    done = await stage.client.ack(messages[:1], True, {"group": stage.group})
    letters = stage.client.queue(stage.queue).dlq(stage.group)
    return {
        "attempts": attempts,
        "next": messages[0]["data"],
        "done": done["results"][0]["success"],
        "lag": await stage.lag(),
        "partitionId": messages[0]["partitionId"],
        "dead": await letters.get(),
        "of another group": (await stage.client.queue(stage.queue).dlq("nobody").get())["total"],
        "of another queue": (await stage.client.queue("nothing").dlq().get())["total"],
    }


async def statuses(stage: Stage) -> Any:
    """Give messages back without spending their budget, and give one up at once."""
    await push(stage, 3, retryLimit=0)
    context = {"group": stage.group, "error": "reason"}
    retries = []
    for _ in range(2):
        messages = await attempt(stage)
        result = await stage.client.ack(messages[0], "retry", context)
        retries.append([messages[0]["data"], result["success"], result["dlq"]])
    messages = await attempt(stage, 3)
    given_up = await stage.client.ack(messages[0], "dlq", context)
    messages = await attempt(stage, 2)
    spent = await stage.client.ack(messages[0], "failed", context)
    (last,) = await attempt(stage)
    done = await stage.client.ack(last, "completed", context)
    dead = await stage.client.queue(stage.queue).dlq().get()
    return {
        "retries": retries,
        "given up": given_up["dlq"],
        "spent": [messages[0]["data"], spent["dlq"]],
        "last": [last["data"], done["success"]],
        "dead": [(letter["data"], letter["errorMessage"]) for letter in dead["messages"]],
        "lag": await stage.lag(),
    }


async def dropped(stage: Stage) -> Any:
    """Fail a message of a queue that has no dead letters."""
    await push(stage, 2, retryLimit=0, deadLetterQueue=False, dlqAfterMaxRetries=False)
    messages = await attempt(stage, 2)
    result = await stage.client.ack(messages[0], False, {"group": stage.group})
    rest = await attempt(stage)
    return {
        "result": [result["success"], result["dlq"]],
        "then": rest[0]["data"],
        "dead": (await stage.client.queue(stage.queue).dlq().get())["total"],
    }


async def middle(stage: Stage) -> Any:
    """Fail a message in the middle of a batch whose beginning is done."""
    await push(stage, 5)
    messages = await attempt(stage, 5)
    context = {"group": stage.group}
    done = await stage.client.ack(messages[:2], True, context)
    failed = await stage.client.ack(messages[2], False, context)
    late = await stage.client.ack(messages[3:], True, context)
    again = await attempt(stage, 3)
    return {
        "done": [r["success"] for r in done["results"]],
        "failed": failed["success"],
        "late": [(r["success"], r["error"]) for r in late["results"]],
        "again": payloads(again),
    }


async def letters(stage: Stage) -> Any:
    """Read dead letters of two partitions page by page and by filter."""
    for partition in ("a", "b"):
        await push(stage, 3, partition, retryLimit=0)
        for _ in range(3):
            builder = stage.client.queue(stage.queue).partition(partition).group(stage.group).subscription_mode("all")
            (message, *_) = await collect(builder.batch(1), 1)
            await stage.client.ack(message, False, {"group": stage.group, "error": "no"})
    everything = (await stage.client.queue(stage.queue).dlq().get())["messages"]

    def dlq() -> Any:
        return stage.client.queue(stage.queue).dlq()

    def brief(answer: dict[str, Any]) -> list[Any]:
        return [f"{letter['partition']}{letter['data']}" for letter in answer["messages"]]

    middle = everything[2]["failedAt"]
    return {
        "all": brief({"messages": everything}),
        "first page": brief(await dlq().limit(4).get()),
        "second page": brief(await dlq().limit(4).offset(4).get()),
        "partition": brief(await stage.client.queue(stage.queue).partition("a").dlq().get()),
        "since": brief(await dlq().from_(middle).get()),
        "until": brief(await dlq().to(middle).get()),
        "future": brief(await dlq().from_("2999-01-01T00:00:00Z").get()),
    }
