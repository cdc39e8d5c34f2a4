"""Brokers that wake each other: what a push at one does to a pop that is parked at another."""

from __future__ import annotations

import statistics

import pytest

from tests.conftest import Brokers
from tests.mesh.cluster import cluster, latencies

# A pop that is not woken looks by itself this often.
SLOW_LOOK = {"POP_WAIT_MAX_INTERVAL_MS": "5000"}
SECRET = {"QUEEN_SYNC_SECRET": "s3cr3t"}


@pytest.mark.parametrize("count", [2, 3])
def test_a_push_at_one_broker_wakes_a_pop_at_another(brokers: Brokers, count: int) -> None:
    several = cluster(brokers, count, {**SECRET, **SLOW_LOOK})
    took = latencies(several[0], several[-1], "orders", 20)
    # Milliseconds on a quiet machine; without a wake it would be seconds.
    assert statistics.median(took) < 0.5
