"""PostgreSQL stops in the middle of everything, without a checkpoint, and recovers from its log."""

from __future__ import annotations

import time
from typing import Any

import psycopg
import pytest

from queen.db.embedded import EmbeddedServer
from tests.conftest import Brokers
from tests.faults.conftest import Run


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stopped_postgres_loses_nothing_and_brokers_come_back(
    brokers: Brokers, embedded: EmbeddedServer, rounds: int
) -> None:
    def connect(**options: Any) -> psycopg.Connection[Any]:
        return psycopg.connect(embedded.dsn(), **{"autocommit": True, **options})

    pair = [brokers(postgres=embedded.environment()) for _ in range(2)]
    run = Run(pair, connect)
    run.wait_busy()
    serving = []
    for k in range(rounds):
        time.sleep(0.001 * (53 * k % 300))  # strike at another moment each time
        embedded.stop("immediate")
        time.sleep(0.05 if k % 4 else 1.2)  # mostly back at once, sometimes later than a short retry
        embedded.start()
        for broker in pair:
            serving.append(run.wait_serving(broker, 5))
        run.wait_busy(5, 3)
    assert run.judge() == []
    assert len(serving) == 2 * rounds
    assert all(broker.running for broker in pair)
