"""`scripts/bench compare`: Queen beside other queues, all under the same load, in one run."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import platform
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import comparison
from bench.hello import hello
from bench.measure import say
from bench.peers import load
from bench.peers.base import Peer, Postgres
from bench.peers.graphile import GraphileWorker
from bench.peers.install import Unavailable
from bench.peers.nats import NatsJetStream
from bench.peers.pgboss import PgBoss
from bench.peers.pgqueuer import PgQueuer
from bench.peers.procrastinate import Procrastinate
from bench.peers.queen import DURABLE, LANES, TITLE, Queen
from bench.peers.rabbitmq import RabbitMQ
from bench.peers.redis import RedisStreams
from bench.report import line_of
from bench.run import Options
from bench.serve import database
from bench.workload import POOL, make_payload

BATCHES = (1, 10, 100)
_PEERS: tuple[type[Peer], ...] = (
    PgQueuer,
    Procrastinate,
    PgBoss,
    GraphileWorker,
    RabbitMQ,
    NatsJetStream,
    RedisStreams,
)

Runs = dict[str, list[dict[str, Any]]]


def parser() -> argparse.ArgumentParser:
    """Its options."""
    names = ["queen", *(peer.name for peer in _PEERS)]
    made = argparse.ArgumentParser(prog="scripts/bench compare", description=__doc__)
    made.add_argument("--repeat", type=int, default=3, help="runs of every row; the median is shown (3)")
    made.add_argument("--seconds", type=float, default=2.5, help="measured time of a row (2.5)")
    made.add_argument("--warmup", type=float, default=0.5, help="time before it (0.5)")
    made.add_argument("--rate", type=float, default=100.0, help="messages per second of the latency row (100)")
    made.add_argument("--payload", type=int, default=200, help="bytes of a payload (200)")
    made.add_argument("--only", nargs="+", choices=names, metavar="PEER", help=f"of {', '.join(names)}")
    made.add_argument("--write", type=Path, metavar="DIRECTORY", help="rewrite its performance.rst and .svg")
    return made


def _turn(peer: Peer, postgres: Postgres, asked: load.Load, rate: float, rows: dict[str, Any]) -> None:
    """Every row of a peer once, into `rows`."""
    peer.start(postgres)
    try:
        peer.prepare()
        there = 0
        for batch in BATCHES:
            rows[f"push b{batch}"], pushed = load.push(peer, asked, batch)
            there += pushed
        wanted = [int(speed * (asked.seconds + asked.warmup)) for speed in peer.speeds]
        there += load.fill(peer, asked, sum(wanted) - there)
        peer.settle()
        for n, batch in enumerate(BATCHES):
            reserved = sum(wanted[n + 1 :])
            rows[f"consume b{batch}"], there = load.consume(peer, asked, batch, there, reserved)
        peer.prepare()
        rows["both b100"] = load.both(peer, asked, 100)
        peer.prepare()
        rows["latency"] = load.latency(peer, asked, rate)
    finally:
        peer.stop()


class Comparison:
    """All turns of all systems."""

    def __init__(self, arguments: argparse.Namespace, postgres: Postgres, payloads: str) -> None:
        self._arguments = arguments
        self._postgres = postgres
        self._load = load.Load(seconds=arguments.seconds, warmup=arguments.warmup, payloads=payloads)
        self._queen = Queen(postgres, self._load, arguments.rate)
        self.peers = [kind() for kind in _PEERS if not arguments.only or kind.name in arguments.only]
        self.runs: dict[str, Runs] = {}
        self.missing: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self.hello: list[float] = []

    def install(self) -> None:
        """Get all peers; note which can't be had."""
        for peer in self.peers:
            try:
                peer.install()
                self.versions[peer.title] = peer.version()
            except (Unavailable, OSError) as problem:
                self._give_up(peer, problem)

    def run(self) -> None:
        """One turn of every system, then the next: a slow spell of the machine hits all alike."""
        for number in range(self._arguments.repeat):
            options = Options(connections=self._load.connections, seconds=self._load.seconds)
            found = hello(options)["requests_per_s"]
            assert isinstance(found, float)
            self.hello.append(found)
            if not self._arguments.only or "queen" in self._arguments.only:
                say(f"[{number + 1}/{self._arguments.repeat}] {TITLE}")
                rows: dict[str, Any] = {}
                self._queen.turn(rows)
                self._keep(TITLE, rows)
            for peer in [peer for peer in self.peers if peer.title not in self.missing]:
                say(f"[{number + 1}/{self._arguments.repeat}] {peer.title}")
                rows = {}
                try:
                    _turn(peer, self._postgres, self._load, self._arguments.rate, rows)
                except (Unavailable, RuntimeError, OSError, ValueError) as problem:
                    self._give_up(peer, problem)
                self._keep(peer.title, rows)
            gc.collect()

    def _keep(self, title: str, rows: dict[str, Any]) -> None:
        runs = self.runs.setdefault(title, {})
        for name, figures in rows.items():
            say(f"    {name}: {comparison.brief(figures)}")
            runs.setdefault(name, []).append(figures)

    def _give_up(self, peer: Peer, problem: Exception) -> None:
        self.missing[peer.title] = " ".join(str(problem).split())
        say(f"{peer.title}: not available: {problem}")

    def document(self) -> dict[str, Any]:
        """Everything, for programs."""
        medians = {
            title: {name: comparison.median(found) for name, found in runs.items()} for title, runs in self.runs.items()
        }
        facts = {peer.title: (peer.lanes, peer.durable) for peer in self.peers} | {TITLE: (LANES, DURABLE)}
        return {
            "version": 1,
            "hello_requests_per_s": comparison.middle(self.hello),
            "machine": {
                "cores": len(os.sched_getaffinity(0)),
                "processor": _processor(),
                "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
                "kernel": platform.release(),
                "python": platform.python_version(),
                "postgresql": self._postgres.version,
            },
            "options": {
                "repeat": self._arguments.repeat,
                "seconds": self._load.seconds,
                "warmup": self._load.warmup,
                "connections": self._load.connections,
                "lanes": self._load.lanes,
                "payload": self._arguments.payload,
                "rate": self._arguments.rate,
            },
            "versions": self.versions,
            "facts": facts,
            "medians": medians,
            "runs": self.runs,
            "not_available": self.missing,
        }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def main(arguments: list[str]) -> int:
    """Entry point of `scripts/bench compare`."""
    parsed = parser().parse_args(arguments)
    gc.disable()
    rng = random.Random(1)
    with tempfile.NamedTemporaryFile("w", prefix="bench-", suffix=".jsonl") as payloads:
        texts = [make_payload(rng, parsed.payload).decode() for _ in range(POOL)]
        payloads.write("\n".join(texts) + "\n")
        payloads.flush()
        try:
            with database() as (_, conninfo):
                postgres = Postgres(conninfo)
                with contextlib.closing(postgres):
                    made = Comparison(parsed, postgres, payloads.name)
                    made.install()
                    started = time.monotonic()
                    made.run()
                    say(f"measured for {(time.monotonic() - started) / 60:.1f} minutes")
                    document = made.document()
        except KeyboardInterrupt:
            return 130
        except (RuntimeError, OSError) as error:
            print(f"bench: {error}", file=sys.stderr)
            return 2
    print(comparison.terminal(document))
    if parsed.write:
        comparison.write(document, parsed.write)
    print(line_of(document))
    return 1 if TITLE not in document["medians"] and not parsed.only else 0
