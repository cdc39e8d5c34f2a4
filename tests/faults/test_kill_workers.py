"""Workers are killed with SIGKILL under load, again and again, and nobody loses anything."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.broker import Broker, wait_until
from tests.conftest import Brokers, Database
from tests.faults.conftest import Run


def kill_and_wait(broker: Broker) -> None:
    """Kill the broker's only worker and wait for the next one."""
    (victim,) = wait_until(broker.worker_pids, what=f"a worker of {broker.name}")
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: set(broker.worker_pids()) - {victim}, 10, f"{broker.name} has a new worker")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_workers_lose_nothing_and_come_back(brokers: Brokers, database: Database, rounds: int) -> None:
    pair = [brokers(), brokers()]
    run = Run(pair, database.connect)
    run.wait_busy()
    serving = []
    for k in range(rounds):
        broker = pair[k % 2]
        kill_and_wait(broker)
        serving.append(run.wait_serving(broker, 5))
        run.wait_busy(5, 3)
        time.sleep(0.001 * (37 * k % 200))  # strike at another moment each time
    assert run.judge() == []
    assert len(serving) == rounds
    with database.connect() as connection:
        row = connection.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").fetchone()
    assert row == (0,)
