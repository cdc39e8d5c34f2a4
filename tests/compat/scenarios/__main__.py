"""Runs scenarios: orders come a line on standard input, their results go a line on standard output.

This is the client's side: it runs in an environment that has the official client and nothing of the
broker.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import traceback
from typing import Any

# The client prints. Answers go where standard output led; prints go to the log with everything else.
_answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

from stage import Stage  # noqa: E402

import queen  # noqa: E402


async def perform(order: dict[str, Any]) -> Any:
    """Run one scenario on a stage of its own and return its result."""
    module, _, function = order["scenario"].partition(".")
    scenario = getattr(importlib.import_module(module), function)
    print(f"--- {order['scenario']} {order['name']}", flush=True)
    async with Stage(order["urls"], order["name"]) as stage:
        return await scenario(stage, **order["arguments"])


async def perform_all(orders: list[dict[str, Any]], seconds: float) -> list[Any]:
    """Run scenarios at the same time and return their results."""
    async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
        tasks = [group.create_task(perform(order)) for order in orders]
    return [task.result() for task in tasks]


def main() -> None:
    """Serve until the input ends."""
    assert queen.__file__.startswith(sys.prefix), f"not the installed client: {queen.__file__}"
    for line in sys.stdin:
        try:
            results = asyncio.run(perform_all(**json.loads(line)))
            text = json.dumps({"results": results})
        except Exception:
            text = json.dumps({"error": traceback.format_exc()})
        _answers.write(text + "\n")
        _answers.flush()


if __name__ == "__main__":
    main()
