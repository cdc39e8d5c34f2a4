"""Queen itself, with the same rows."""

from __future__ import annotations

import contextlib
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from bench.admin import wait_until_healthy
from bench.database import Database
from bench.measure import Figures, Machine
from bench.peers.base import Postgres
from bench.peers.load import Load
from bench.run import Backlog, Options
from bench.scenarios import SCENARIOS
from bench.serve import ServeError, free_port, gunicorn
from bench.workload import Target

_CONFIG = Path(__file__).resolve().parent.parent.parent / "conf" / "gunicorn.conf.py"
_DATABASE = "bench_queen"

TITLE = "Queen"
LANES = "64 partitions"
DURABLE = "committed by PostgreSQL (fsync)"


class Queen:
    """A broker of one worker with its own database; its generator speaks HTTP and runs in this process."""

    def __init__(self, postgres: Postgres, load: Load, rate: float) -> None:
        self._postgres = postgres
        self._load = load
        self._rate = rate

    def turn(self, rows: dict[str, Figures]) -> None:
        """Start a broker, measure every row once into `rows`, stop it."""
        conninfo = self._postgres.fresh(_DATABASE)
        parts = conninfo_to_dict(conninfo)
        port = free_port()
        environment = {
            "PG_HOST": str(parts["host"]),
            "PG_PORT": str(parts["port"]),
            "PG_USER": str(parts["user"]),
            "PG_PASSWORD": str(parts["password"]),
            "PG_DATABASE": _DATABASE,
            "PORT": str(port),
            "QUEEN_BIND_ADDR": "127.0.0.1",
        }
        with contextlib.ExitStack() as stack:
            stack.callback(self._postgres.drop, _DATABASE)
            stack.enter_context(gunicorn(["-c", str(_CONFIG), "queen.wsgi"], port, environment))
            target = Target("127.0.0.1", port)
            if failure := wait_until_healthy(target, 60.0):
                raise ServeError(f"the broker is not healthy: {failure}")
            database = Database(conninfo)
            stack.callback(database.close)
            self._measure(target, Machine(target.host, port, database), rows)

    def _measure(self, target: Target, machine: Machine, rows: dict[str, Figures]) -> None:
        load = self._load
        backlog = Backlog(target)

        def one(scenario: str, batch: int) -> Figures:
            options = Options(
                connections=load.connections,
                producers=load.connections,
                consumers=load.connections,
                partitions=load.lanes,
                batch=batch,
                seconds=load.seconds,
                warmup=load.warmup,
                rate=self._rate,
            )
            return SCENARIOS[scenario](target, machine, options, backlog)

        for batch in (1, 10, 100):
            rows[f"push b{batch}"] = _common(one("push", batch), ("push",))
        for batch in (1, 10, 100):
            rows[f"consume b{batch}"] = _common(one("pop", batch), ("consume",))
        rows["both b100"] = _common(one("both", 100), ("push", "consume"))
        found = one("latency", 1)
        rows["latency"] = _common(found, ("push", "consume"))
        latencies = found["latency_ms"]
        assert isinstance(latencies, dict)
        rows["latency"]["latency_ms"] = latencies["push to receipt"]


def _common(run: Figures, roles: tuple[str, ...]) -> Figures:
    """The figures that the peers have too."""
    costs = run["cpu_s_per_1000"]
    assert isinstance(costs, dict)
    server = [costs[name] for name in ("broker", "postgresql") if costs[name] is not None]
    names = {"push": "pushed_per_s", "consume": "consumed_per_s"}
    return {
        "rates": {role: run[names[role]] for role in roles},
        "seconds": run["seconds"],
        "server_us": round(sum(server) * 1000, 2) if len(server) == 2 else None,
        "client_us": round(costs["bench"] * 1000, 2) if costs["bench"] is not None else None,
        "client_cores": run["bench_core_share"],
        "errors": run["errors"],
        "error_samples": run["error_samples"],
    }
