"""The script that flips the flags of several brokers and waits for them."""

from __future__ import annotations

import subprocess
import sys
from subprocess import CompletedProcess

from tests.broker import ROOT, Broker
from tests.conftest import Brokers

# No mesh, and a pass of the reconcile loop five times a second.
ALONE = {"QUEEN_SYNC_ENABLED": "false", "QUEEN_CACHE_REFRESH_INTERVAL_MS": "200"}


def run(*arguments: str, brokers: list[Broker] | None = None) -> CompletedProcess[str]:
    named = ["--brokers", ",".join(broker.url for broker in brokers)] if brokers else []
    command = [sys.executable, str(ROOT / "scripts/maintenance"), *arguments, *named]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_it_flips_and_waits_for_all(brokers: Brokers) -> None:
    both = [brokers(ALONE, workers=2), brokers(ALONE)]
    assert run("status", brokers=both).stdout == "".join(f"{broker.url} push=off pop=off\n" for broker in both)
    for flag in ("push", "pop"):
        done = run(flag, "on", brokers=both)
        assert (done.returncode, done.stderr) == (0, "")
        assert "ENABLED" in done.stdout and f"{flag} maintenance is on at 2 of 2 brokers" in done.stdout
    assert run("status", brokers=both).stdout == "".join(f"{broker.url} push=on pop=on\n" for broker in both)
    assert run("push", "off", brokers=both).returncode == 0
    both[0].kill()
    done = run("pop", "off", "--timeout", "0.5", brokers=both)  # the second broker takes the flip
    assert done.returncode == 1
    assert f"{both[0].url} can't be reached" in done.stderr
    assert run("status", brokers=both).returncode == 1
    both[0].start(ALONE)
    assert run("pop", "off", brokers=both).returncode == 0


def test_it_says_what_is_wrong(brokers: Brokers) -> None:
    for arguments in (("status", "on"), ("push",), ("pull", "on"), ("push", "maybe"), ()):
        assert run(*arguments).returncode == 2
    done = run("push", "on", "--brokers", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert "no broker flipped it" in done.stderr
