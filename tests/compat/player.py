"""Plays scenarios: code that uses the official client, run by the interpreter that has it installed.

One process per version of the client lives as long as the tests do, since starting one costs more than a
scenario takes. It reads a JSON line with scenarios to run at the same time, and answers with one.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any

SCENARIOS = Path(__file__).resolve().parent / "scenarios"

# Scenarios end themselves after their time and say where they hung; only a blocked process needs more.
_GRACE_SECONDS = 10.0


class ScenarioFailed(AssertionError):
    """A scenario raised; the message is its traceback in the other process."""


class Player:
    """The process of one version of the client."""

    def __init__(self, version: str, python: Path, log: Path) -> None:
        """Describe it; the process starts with the first scenario. What it prints goes to `log`."""
        self.version = version
        self._python = python
        self._log_path = log
        self._process: subprocess.Popen[str] | None = None

    def play(self, orders: list[dict[str, Any]], seconds: float) -> list[Any]:
        """Run scenarios at the same time and return their results.

        An order is `scenario` (`module.function`), `urls` of the brokers, a `name` for its queue, and
        its own `arguments`. Raises ScenarioFailed with the traceback when one raises, or when they take
        longer than so many seconds.
        """
        line = json.dumps({"orders": orders, "seconds": seconds})
        answer = self._exchange(line, seconds + _GRACE_SECONDS)
        if "error" in answer:
            raise ScenarioFailed(f"with client {self.version}:\n{answer['error']}")
        results: list[Any] = answer["results"]
        return results

    def log(self) -> str:
        """Return all that the client printed, over all scenarios."""
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    def stop(self) -> None:
        """End the process: it leaves when its input does."""
        if self._process is not None:
            assert self._process.stdin
            self._process.stdin.close()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _exchange(self, line: str, seconds: float) -> dict[str, Any]:
        process = self._running()
        assert process.stdin
        assert process.stdout
        process.stdin.write(line + "\n")
        process.stdin.flush()
        deadline = time.monotonic() + seconds
        # One line for one line: what is readable is the beginning of the answer, and the rest follows at once.
        if not select.select([process.stdout], [], [], deadline - time.monotonic())[0]:
            process.kill()
            self.stop()
            raise ScenarioFailed(f"client {self.version} is blocked: no answer within {seconds} s\n{self._tail()}")
        text = process.stdout.readline()
        if not text:
            status = process.wait()
            self._process = None
            raise ScenarioFailed(f"client {self.version} ended with status {status}\n{self._tail()}")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            # Nothing of the caller's shell may turn the client, or lead its imports to this checkout.
            environment = {k: v for k, v in os.environ.items() if not k.startswith(("QUEEN_", "PYTHON"))}
            with self._log_path.open("a") as log:
                self._process = subprocess.Popen(
                    [self._python, SCENARIOS],
                    cwd=SCENARIOS,
                    env={**environment, "PYTHONUNBUFFERED": "1"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
        return self._process

    def _tail(self) -> str:
        return "\n".join(self.log().splitlines()[-50:])
