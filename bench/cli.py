"""The command line: which scenarios, against which broker, and how often."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import resource
import signal
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from urllib.parse import urlsplit

import psycopg

from bench import report
from bench.admin import wait_until_healthy
from bench.database import Database, conninfo_from_environment
from bench.hello import hello
from bench.measure import Figures, Machine, say
from bench.run import Backlog, Options
from bench.scenarios import SCENARIOS, median_of, median_run, primary_key
from bench.serve import ServeError, broker, version_of
from bench.workload import Target

Plan = list[tuple[str, Options]]

_EPILOG = """
scenarios:
  push     producers only
  pop      pop + ack from a deep backlog, written beforehand and read by a new consumer group
  both     producers and consumers at once; then drains and compares every id
  latency  push to receipt by a parked consumer at a fixed rate
  idle     consumers that wait for nothing: CPU and memory of the servers
  hello    requests per second of a one-line Flask view on one gevent worker ("H")
  compare  Queen beside other queues under the same load; see scripts/bench compare --help
  all      hello, push/pop/both at batch 1, 10 and 100 on 64 lanes, one lane, latency

The last line of the output is one JSON document. The exit status is 1 when there were errors,
losses or duplicates, 2 when the broker can't be reached.
A newcomer needs no more than: scripts/bench all --serve
"""


def parser() -> argparse.ArgumentParser:
    """All options; their defaults are those of `Options`."""
    made = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measure a running broker over HTTP.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("scenario", choices=[*SCENARIOS, "hello", "all"])
    where = made.add_argument_group("where")
    where.add_argument("--url", default="http://127.0.0.1:6632", help="the broker (%(default)s)")
    where.add_argument("--serve", action="store_true", help="start a broker, and without PG_HOST a PostgreSQL")
    where.add_argument("--pg", metavar="CONNINFO", help="PostgreSQL, for its figures (default: PG_* variables)")
    where.add_argument("--token", default=os.environ.get("QUEEN_BENCH_TOKEN"), help="bearer token")
    where.add_argument("--queue", help="a queue to use and keep (default: a new one, deleted at the end)")
    load = made.add_argument_group("load")
    for name, kind, text in (
        ("connections", int, "connections of push, pop, hello; parked pops of idle"),
        ("producers", int, "connections that push in both and latency"),
        ("consumers", int, "connections that pop in both and latency"),
        ("batch", int, "messages per push and per pop"),
        ("partitions", int, "partitions; one batch goes to one"),
        ("groups", int, "consumer groups"),
        ("payload", int, "bytes of a payload"),
        ("seconds", float, "measured time"),
        ("warmup", float, "time before it"),
        ("rate", float, "messages per second of latency"),
        ("wait-ms", int, "long poll of a pop, 0 = no waiting"),
        ("backlog", int, "messages of pop's backlog, 0 = enough for a fast broker"),
        ("backlog-batch", int, "messages per push when the backlog is written"),
        ("seed", int, "of the payloads"),
    ):
        default = getattr(Options, name.replace("-", "_"))
        load.add_argument(f"--{name}", type=kind, default=default, help=f"{text} ({default:g})")
    load.add_argument("--repeat", type=int, default=1, help="runs of every row; the median is shown (1)")
    return made


def standard_rows(base: Options) -> Plan:
    """The rows of `all`, but for the hello view."""
    plan: Plan = []
    for scenario in ("push", "pop", "both"):
        plan += [(scenario, replace(base, batch=batch, partitions=64)) for batch in (1, 10, 100)]
    # One holder at a time can have a lane: more consumers than one would only get in its way.
    lane = replace(base, partitions=1, connections=1)
    plan += [("pop", replace(lane, batch=batch)) for batch in (1, 100)]
    plan.append(("latency", replace(base, batch=1, partitions=64)))
    return plan


class Benchmark:
    """All runs of one call, against one broker."""

    def __init__(self, target: Target, database: Database | None) -> None:
        self.target = target
        self.machine = Machine(target.host, target.port, database)
        self._runs: dict[tuple[str, Options], list[Figures]] = {}
        self._hello: list[Figures] = []

    def execute(self, plan: Plan, base: Options, repeat: int, with_hello: bool) -> None:
        """Run every row once, then all of them again: a slow spell of the machine hits all alike."""
        backlog = Backlog(self.target)
        try:
            for turn in range(repeat):
                if with_hello:
                    self._hello.append(hello(base))
                for scenario, options in plan:
                    say(f"[{turn + 1}/{repeat}] {scenario} batch {options.batch}, lanes {options.partitions}")
                    figures = SCENARIOS[scenario](self.target, self.machine, options, backlog)
                    self._runs.setdefault((scenario, options), []).append(figures)
                    gc.collect()
        finally:
            backlog.close(base)

    def print(self, base: Options) -> int:
        """Print the report; the exit status."""
        rate = median_of(self._hello, "requests_per_s") if self._hello else None
        groups = ([self._hello] if self._hello else []) + list(self._runs.values())
        rows = []
        medians = []
        for runs in groups:
            key = primary_key(runs[0])
            middle = median_run(runs)
            medians.append(middle)
            print(report.detail(middle, runs, key), end="\n\n")
            rows.append({"name": report.title(middle), "median": middle, "runs": [run[key] for run in runs]})
        if len(medians) > 1:
            print(report.summary(medians, rate), end="\n\n")
        for shape, micros in (round_trips := report.round_trips(medians)).items():
            print(f"CPU of broker and PostgreSQL per message, push + pop + ack, {shape}: {micros:,.1f} us")
        machine = self.machine.describe()
        print(report.machine_line(machine))
        for note in self.machine.notes():
            print(f"note: {note}")
        failed = any(_failed(run) for runs in groups for run in runs)
        document = {
            "version": 1,
            "ok": not failed,
            "hello_requests_per_s": rate,
            "round_trip_cpu_us": round_trips,
            "machine": machine,
            "broker": version_of(self.target),
            "options": {item.name: getattr(base, item.name) for item in fields(base)},
            "rows": rows,
        }
        print(report.line_of(document))
        return 1 if failed else 0


def _failed(run: Figures) -> bool:
    return any(run.get(key) for key in ("errors", "lost", "duplicates"))


@contextlib.contextmanager
def _broker(arguments: argparse.Namespace) -> Iterator[tuple[Target, str | None]]:
    """The broker to measure and the connection string of its database, where known."""
    if arguments.serve:
        with broker() as (target, conninfo):
            yield target, conninfo
        return
    url = urlsplit(arguments.url)
    if url.scheme != "http" or not url.hostname:
        raise ServeError(f"not an http:// URL: {arguments.url}")
    target = Target(url.hostname, url.port or 80, arguments.token)
    failure = None if arguments.scenario == "hello" else wait_until_healthy(target, 2.0)
    if failure:
        raise ServeError(f"no healthy broker at {arguments.url}: {failure} (--serve starts one)")
    yield target, arguments.pg or conninfo_from_environment()


def _open_database(conninfo: str | None) -> Database | None:
    if conninfo is None:
        return None
    try:
        return Database(conninfo)
    except psycopg.Error as error:
        say(f"no PostgreSQL figures: {error}")
        return None


def main(arguments: list[str] | None = None) -> int:
    """Entry point of scripts/bench."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["compare"]:
        from bench.compare import main as compare

        return compare(words[1:])
    parsed = parser().parse_args(arguments)
    base = Options(**{item.name: getattr(parsed, item.name) for item in fields(Options)})
    if base.batch < 1 or base.partitions < 1 or base.groups < 1 or parsed.repeat < 1:
        parser().error("--batch, --partitions, --groups and --repeat start at 1")
    plan = standard_rows(base) if parsed.scenario == "all" else [(parsed.scenario, base)]
    with_hello = parsed.scenario in ("all", "hello")
    if parsed.scenario == "hello":
        plan = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up then too
    # A connection costs a descriptor; a broker of ours inherits the limit.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.disable()  # nothing on the hot path makes cycles, and a collection would show up as latency
    try:
        with _broker(parsed) as (target, conninfo):
            benchmark = Benchmark(target, _open_database(conninfo))
            benchmark.execute(plan, base, parsed.repeat, with_hello)
            return benchmark.print(base)
    except (RuntimeError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
