"""Work that goes on while brokers come and go."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from stage import Stage


async def work(stage: Stage, stop: str, producers: int) -> Any:
    """Push and consume until a file exists and everything is consumed; what raised is tried again."""
    accepted: list[str] = []
    consumed: list[str] = []
    errors: list[str] = []
    producing = True

    async def produce(number: int) -> None:
        count = 0
        while not Path(stop).exists():
            key = f"{number}-{count}"
            queue = stage.client.queue(stage.queue).partition(f"p{number}")
            try:
                answer = await queue.push([{"transactionId": key, "data": count}])
            except Exception as error:
                errors.append(f"push: {error!r}")
                await asyncio.sleep(0.1)
                continue
            assert [item["status"] for item in answer] in (["queued"], ["duplicate"], ["buffered"]), answer
            accepted.append(key)
            count += 1
            await asyncio.sleep(0.01)

    async def consume() -> None:
        while producing or len(set(consumed)) < len(accepted):
            try:
                messages = await stage.subscribed().batch(50).wait(True).timeout_millis(500).pop()
                if messages:
                    answer = await stage.client.ack(messages, True, {"group": stage.group})
                    if answer.get("success") is False:
                        errors.append(f"ack: {answer}")
                        continue
                    consumed.extend(message["transactionId"] for message in messages)
            except Exception as error:
                errors.append(f"consume: {error!r}")
                await asyncio.sleep(0.1)

    consumer = asyncio.create_task(consume())
    await asyncio.gather(*(produce(number) for number in range(producers)))
    producing = False
    await consumer
    return {"accepted": accepted, "consumed": consumed, "errors": errors, "total": await stage.total()}
