"""scripts/stack: all of it up, walked through, and nothing of it left, however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from queen.db.embedded import EmbeddedServer, Guard
from tests.broker import ROOT, wait_until

PORTS = (6632, 6642, 6711, 6633, 6643)
STACK = ROOT / "scripts" / "stack"


class Stack:
    """A stack with its files in a directory of the test's own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.offset = _free_offset()
        self.process: subprocess.Popen[str] | None = None
        self._guard: Guard | None = None

    def run(self, *arguments: str, status: int = 0, **variables: str) -> str:
        """Run a command to its end and return what it printed. Raises AssertionError for another exit status."""
        done = subprocess.run(
            self._command(*arguments), env=_environment() | variables, capture_output=True, text=True, timeout=200
        )
        output = done.stdout + done.stderr
        assert done.returncode == status, output
        return output

    def up(self) -> subprocess.Popen[str]:
        """Start it in the foreground, as in a terminal, and return when it says that it is ready."""
        output = (self.directory.parent / "up.log").open("w+")
        self.process = subprocess.Popen(
            self._command("up", "--port-offset", str(self.offset)),
            env=_environment(),
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
        )
        self._guard = Guard(self.process.pid, signal.SIGTERM)

        def ready() -> bool:
            text = (self.directory.parent / "up.log").read_text()
            assert self.process and self.process.poll() is None, text
            return "The stack is ready." in text

        wait_until(ready, 150, "the stack is ready")
        return self.process

    def state(self) -> Any:
        return json.loads((self.directory / "state.json").read_text())

    def pids(self) -> list[int]:
        """The processes that belong to it: those whose command line or environment names its directory."""
        found = []
        for process in psutil.process_iter():
            try:
                words = [*process.cmdline(), *process.environ().values(), process.cwd()]
            except (psutil.Error, OSError):
                continue
            if process.pid != os.getpid() and any(str(self.directory) in word for word in words):
                found.append(process.pid)
        return found

    def end(self) -> None:
        """Leave nothing, whatever the test has come to."""
        if self.directory.exists():
            self.run("down")
        if self.process and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)
        if self._guard:
            self._guard.dismiss()
        if (self.directory / "postgresql").exists():
            EmbeddedServer(self.directory / "postgresql").destroy()

    def _command(self, *arguments: str) -> list[str]:
        return [sys.executable, str(STACK), "--directory", str(self.directory), *arguments]


def _environment() -> dict[str, str]:
    """No HOME, and no PostgreSQL in the PATH."""
    kept = {name: os.environ[name] for name in ("TMPDIR",) if name in os.environ}
    return kept | {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}


def _free_offset() -> int:
    for offset in range(14000 + os.getpid() % 5000, 25000, 37):
        try:
            for port in PORTS:
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", port + offset))
        except OSError:
            continue
        return offset
    raise AssertionError("no free ports")


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path / "stack")
    try:
        yield stack
    finally:
        stack.end()


@pytest.mark.timeout(400)
def test_up_demo_status_and_down(stack: Stack) -> None:
    stack.run("status", status=3)
    said = stack.run("up", "-d", "--port-offset", str(stack.offset))
    assert said.count("healthy") == 3
    assert (stack.directory / ".env").stat().st_mode & 0o777 == 0o600
    secrets = (stack.directory / ".env").read_text()
    assert len(re.findall(r"^(?:CELL_JWT|MESH|SESSION)_SECRET=[0-9a-f]{64}$", secrets, re.MULTILINE)) == 3
    assert "runs already" in stack.run("up", status=1)

    shown = stack.run("demo")
    assert '"payload":{"hello":"world"}' in shown and '"data":{"hello":"world"}' in shown
    assert "producerSub is queen-proxy" in shown
    assert "qk_live_" in shown and "queen-a is stopped." in shown and "queen-b is stopped." in shown
    again = stack.run("demo")
    assert '"api_key": null' in again

    hashes = stack.run("psql", "-tA", "-c", "SELECT key_hash FROM queen_proxy.api_keys")
    assert re.fullmatch(r"([0-9a-f]{64}\n)+", hashes)
    assert "mesh: started server_id=queen-a" in stack.run("logs", "queen-a", "-n", "500")
    assert "queen-b    | " in stack.run("logs")

    # One that dies is started again.
    os.kill(stack.state()["services"]["queen-a"]["pid"], signal.SIGKILL)
    wait_until(lambda: stack.state()["services"]["queen-a"]["restarts"] == 1, 60, "queen-a is counted as started again")
    wait_until(lambda: stack.state()["services"]["queen-a"]["state"] == "running", 60, "queen-a is healthy again")
    assert stack.run("status").count("healthy") == 3

    assert "stopped" in stack.run("down", "--volumes")
    assert not stack.directory.exists()
    assert stack.pids() == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.timeout(300)
def test_nothing_is_left_when_it_ends(stack: Stack, how: signal.Signals) -> None:
    process = stack.up()
    assert len(stack.pids()) >= 6
    process.send_signal(how)
    process.wait(90)
    wait_until(lambda: stack.pids() == [], 90, "all its processes end")
    for port in PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port + stack.offset))


def test_a_missing_secret_is_named_and_nothing_starts(stack: Stack) -> None:
    stack.directory.mkdir()
    (stack.directory / ".env").write_text(f"CELL_JWT_SECRET={'a' * 64}\nSESSION_SECRET=\n")
    said = stack.run("up", "--port-offset", str(stack.offset), status=1)
    assert "doesn't set MESH_SECRET, SESSION_SECRET" in said
    assert not (stack.directory / "postgresql").exists()


def test_a_taken_port_is_named_and_nothing_starts(stack: Stack) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 6711 + stack.offset))
        other.listen()
        said = stack.run("up", "--port-offset", str(stack.offset), status=1)
    assert f"Port {6711 + stack.offset} on 127.0.0.1 is in use" in said and "--port-offset" in said
    assert not (stack.directory / "postgresql").exists()


def test_commands_say_when_nothing_runs(stack: Stack) -> None:
    for command in (["demo"], ["stop", "queen-a"], ["psql", "-c", "SELECT 1"]):
        assert "scripts/stack up" in stack.run(*command, status=1)
    assert "doesn't run" in stack.run("down")
