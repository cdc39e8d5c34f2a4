"""Load on a peer: generator processes, and the figures of one row."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.cpu import Tree
from bench.measure import percentiles, say
from bench.peers.base import Peer

PROCESSES = 2  # of each role, so that a generator has both cores of a small machine to itself
_READY_SECONDS = 30.0
_DRAINED = 0.97  # the end of a backlog is not measured: some consumers have nothing left then

Figures = dict[str, Any]


@dataclass(frozen=True)
class Load:
    """The same for every peer."""

    connections: int = 16
    lanes: int = 64
    seconds: float = 3.0
    warmup: float = 0.5
    payloads: str = ""


class Generator:
    """One process of a peer's client library."""

    def __init__(self, peer: Peer, load: Load, role: str, number: int, **more: Any) -> None:
        share = load.connections // PROCESSES
        task: dict[str, Any] = {
            "role": role,
            "connections": share,
            "first": number * share,
            "total": load.connections,
            "lanes": load.lanes,
            "payloads": load.payloads,
            "batch": 1,
            "rate": 0,
            "limit": 0,
            "timed": False,
        }
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `stop`
        self._process = subprocess.Popen(
            [*peer.command(), json.dumps(task | peer.task() | more)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.tree = Tree(self._process.pid)

    def _tell(self, word: str) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(self._last_words()) from None

    def _read(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(self._last_words())
        return line

    def _last_words(self) -> str:
        self._errors.seek(0)
        return f"a load generator ended: {self._errors.read().strip()[-500:]}"

    def wait_ready(self) -> None:
        """Wait until it is connected."""
        while self._read().strip() != "ready":
            pass

    def go(self) -> None:
        """Let it work."""
        self._tell("go")

    def ask(self) -> None:
        """Ask for a sample; `answer` has it. In two steps, so that all are asked at the same time."""
        self._tell("sample")

    def answer(self) -> Figures:
        """The counts and the clock of the generator."""
        answer: Figures = json.loads(self._read())
        return answer

    def finish(self) -> Figures:
        """Stop it; everything it knows."""
        self._tell("stop")
        return self.answer()

    def kill(self) -> None:
        """End it in any case."""
        if self._process.poll() is None:
            try:
                self._process.wait(1.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        self._errors.close()


class Row:
    """The generators of one row, from start to stop."""

    def __init__(self, peer: Peer, load: Load, roles: Sequence[str], settle: float = 0.0, **more: Any) -> None:
        self._peer = peer
        self._load = load
        self._groups: dict[str, list[Generator]] = {role: [] for role in roles}
        self._all: list[Generator] = []
        self.results: dict[str, list[Figures]] = {}
        try:
            for role in roles:
                for number in range(PROCESSES):
                    made = Generator(peer, load, role, number, **more)
                    self._groups[role].append(made)
                    self._all.append(made)
            for made in self._all:
                made.wait_ready()
            # Consumers first, so that they wait already when the first message comes.
            for role in sorted(roles):
                for made in self._groups[role]:
                    made.go()
                time.sleep(settle if role == "consume" else 0.0)
        except BaseException:
            self.close()
            raise

    def samples(self) -> dict[str, list[Figures]]:
        """Counts of all, taken at about the same time."""
        for generator in self._all:
            generator.ask()
        return {role: [one.answer() for one in group] for role, group in self._groups.items()}

    def counts(self, role: str) -> int:
        """How many messages all generators of a role have done."""
        return int(sum(one["count"] for one in self.samples()[role]))

    def measure(self, limit: int | None = None) -> Figures:
        """Warm up, measure, stop. A `limit` on what is consumed ends the window early."""
        time.sleep(self._load.warmup)
        before, servers, clients = self.samples(), self._servers(), self._clients()
        started = time.monotonic()
        after = before
        while (left := started + self._load.seconds - time.monotonic()) > 0:
            time.sleep(min(left, 0.1 if limit else left))
            if limit and time.monotonic() - started < self._load.seconds:
                now = self.samples()
                if sum(one["count"] for one in now["consume"]) > limit:
                    break
        after = self.samples()
        servers, clients = self._servers() - servers, self._clients() - clients
        seconds = time.monotonic() - started
        rates = {role: _rate(before[role], after[role]) for role in self._groups}
        self.stop()
        known = [one for group in self.results.values() for one in group]
        messages = sum(rates.values()) / len(rates) * seconds
        return {
            "rates": {role: round(rate, 1) for role, rate in rates.items()},
            "seconds": round(seconds, 2),
            "server_us": round(servers / 1e3 / messages, 2) if messages else None,
            "client_us": round(clients / 1e3 / messages, 2) if messages else None,
            "client_cores": round(clients / 1e9 / seconds, 2),
            "errors": sum(one["errors"] for one in known),
            "error_samples": [text for one in known for text in one["samples"]][:3],
        }

    def stop(self) -> None:
        """Stop producers, then consumers."""
        for role, group in self._groups.items():
            self.results[role] = [generator.finish() for generator in group]
        self.close()

    def close(self) -> None:
        """End all processes."""
        for generator in self._all:
            generator.kill()
        self._all.clear()

    def _servers(self) -> int:
        return sum(tree.cpu_ns() for tree in self._peer.trees())

    def _clients(self) -> int:
        return sum(generator.tree.cpu_ns() for generator in self._all)


def _rate(before: list[Figures], after: list[Figures]) -> float:
    pairs = zip(before, after, strict=True)
    return float(sum((new["count"] - old["count"]) * 1e9 / max(1, new["ns"] - old["ns"]) for old, new in pairs))


def push(peer: Peer, load: Load, batch: int) -> tuple[Figures, int]:
    """Producers only; the figures, and how many messages there are now."""
    row = Row(peer, load, ["push"], batch=batch)
    figures = row.measure()
    return figures, sum(one["count"] for one in row.results["push"])


def fill(peer: Peer, load: Load, missing: int) -> int:
    """Make the backlog deeper; by how much."""
    if missing <= 0:
        return 0
    say(f"  filling with {missing:,} more")
    row = Row(peer, load, ["push"], batch=100, limit=-(-missing // PROCESSES))
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and row.counts("push") < missing:
        time.sleep(0.05)
    row.stop()
    return sum(one["count"] for one in row.results["push"])


def consume(peer: Peer, load: Load, batch: int, backlog: int, reserved: int) -> tuple[Figures, int]:
    """Consumers of a backlog; the figures, and how many messages are left.

    What is `reserved` for the rows that follow is left alone, if need be by a shorter window.
    """
    row = Row(peer, load, ["consume"], batch=batch)
    figures = row.measure(max(1, int((backlog - reserved) * _DRAINED)))
    return figures, backlog - sum(one["count"] for one in row.results["consume"])


def both(peer: Peer, load: Load, batch: int) -> Figures:
    """Producers and consumers at once."""
    return Row(peer, load, ["push", "consume"], batch=batch).measure()


def latency(peer: Peer, load: Load, rate: float) -> Figures:
    """From push to receipt at a fixed rate, by consumers that wait."""
    row = Row(peer, load, ["push", "consume"], batch=1, settle=1.0, rate=rate / PROCESSES, timed=True)
    figures = row.measure()
    values = [micros * 1000 for one in row.results["consume"] for micros in one["latencies"]]
    # The first ones paid for connections and caches.
    figures["latency_ms"] = percentiles(values[len(values) // 10 :])
    return figures
