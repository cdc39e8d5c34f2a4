"""One broker at a time does a job, and nothing that happens to it keeps the others from it."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import gevent
import pytest

from queen.db.connection import Statement
from queen.db.errors import StatementFailed, Unavailable
from queen.jobs.retention import LOCK
from tests.broker import ROOT, wait_until
from tests.conftest import Brokers, Database
from tests.engine.conftest import Lab
from tests.jobs.conftest import Sweepers, fill

HOLD = """
import sys, time
from queen.jobs.lock import SessionLock
from queen.log import Log
lock = SessionLock(sys.argv[1], int(sys.argv[2]), Log("test"))
print(lock.acquire(), flush=True)
time.sleep(600)
"""


def holders(lab: Lab) -> list[int]:
    return [
        pid
        for (pid,) in lab.rows(
            "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND classid = 0 AND objid = %s AND granted"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
            LOCK,
        )
    ]


def test_a_second_broker_leaves_the_cycle_to_the_first(lab: Lab, sweepers: Sweepers) -> None:
    one, other = sweepers(), sweepers()
    assert one.lock.acquire()
    assert other.job.cycle() is None
    assert other.connections.statements == []
    one.lock.release()
    assert other.job.cycle() is not None
    assert one.job.cycle() is not None
    assert holders(lab) == []


def test_it_is_released_when_a_step_fails(lab: Lab, sweepers: Sweepers, queue: str) -> None:
    sweeper = sweepers()
    run = sweeper.connections.call

    def fail(statement: Statement, parameters: Any, *more: Any) -> Any:
        if statement.name == "retention_due":
            raise failure
        return run(statement, parameters, *more)

    sweeper.connections.call = fail  # type: ignore[method-assign]
    for failure in (StatementFailed("no"), Unavailable("no"), RuntimeError("no"), gevent.GreenletExit()):
        with pytest.raises(type(failure)):
            sweeper.job.cycle()
        assert holders(lab) == []


def test_a_cycle_that_is_killed_releases_it(lab: Lab, sweepers: Sweepers, queue: str) -> None:
    sweeper = sweepers()
    lab.configure(queue, retentionEnabled=True, retentionSeconds=100)
    fill(lab, queue, 300)
    with lab.database.connect(autocommit=False) as blocker:
        blocker.execute("SELECT 1 FROM queen.log_partitions FOR UPDATE")
        cycle = gevent.spawn(sweeper.job.cycle)
        wait_until(lambda: gevent.sleep(0.01) or holders(lab), what="the cycle holds the lock")
        gevent.sleep(0.1)
        cycle.kill()
        wait_until(lambda: holders(lab) == [], what="the lock is free")


def test_a_killed_process_frees_it_at_once(lab: Lab, sweepers: Sweepers) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, lab.database.conninfo, str(LOCK)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "True\n"
        assert sweepers().job.cycle() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_until(lambda: holders(lab) == [], what="the lock is free")
    assert sweepers().job.cycle() is not None


def test_a_cycle_that_lost_the_lock_takes_no_further_step(lab: Lab, sweepers: Sweepers, queue: str) -> None:
    sweeper = sweepers(RETENTION_BATCH_SIZE="1")
    lab.execute("DELETE FROM queen.queues")
    lab.configure(queue, retentionEnabled=True, retentionSeconds=100)
    fill(lab, queue, *range(1000, 900, -10))
    run = sweeper.connections.call

    def lose(statement: Statement, parameters: Any, *more: Any) -> Any:
        result = run(statement, parameters, *more)
        if statement.name == "retention_step":
            (holder,) = holders(lab)
            lab.execute("SELECT pg_terminate_backend(%s)", holder)
            wait_until(lambda: not sweeper.lock.held, what="the connection is closed")
        return result

    sweeper.connections.call = lose  # type: ignore[method-assign]
    assert sweeper.cycle().segments_deleted == 1
    sweeper.connections.call = run  # type: ignore[method-assign]
    assert sweeper.cycle().segments_deleted == 9


def test_a_stopping_broker_ends_its_cycle_early(lab: Lab, sweepers: Sweepers, queue: str) -> None:
    sweeper = sweepers()
    lab.execute("DELETE FROM queen.queues")
    lab.configure(queue, retentionEnabled=True, retentionSeconds=100)
    fill(lab, queue, 300)
    sweeper.stopping = True
    assert sweeper.cycle().segments_deleted == 0
    assert holders(lab) == []


def test_brokers_sweep_and_the_next_goes_on_when_one_is_killed(brokers: Brokers, database: Database) -> None:
    env = {"RETENTION_INTERVAL": "50"}
    one, other = brokers(env), brokers(env)
    one.request(
        "POST", "/api/v1/configure", {"queue": "q", "options": {"retentionEnabled": True, "retentionSeconds": 1}}
    )
    with database.connect() as sql:

        def stored() -> int:
            row = sql.execute("SELECT count(*) FROM queen.log_segments").fetchone()
            return row[0] if row else 0

        one.push([{"queue": "q", "payload": 1}])
        wait_until(lambda: stored() == 0, 30, "the message is deleted")
        one.kill()
        other.push([{"queue": "q", "payload": 2}])
        wait_until(lambda: stored() == 0, 30, "the survivor deletes")
    assert other.stop() == 0
    assert "not-held" not in one.log() + other.log()
    assert "service started" in other.log()
