"""Brokers that were not told agree with the database all the same."""

from __future__ import annotations

import gevent
import pytest

from queen.engine.flags import Flag
from queen.jobs.reconcile import Reconcile
from tests.broker import Broker, wait_until
from tests.conftest import Brokers
from tests.engine.conftest import Lab, ids

PUSH = "/api/v1/system/maintenance"
POP = "/api/v1/system/maintenance/pop"
# No mesh, and a pass of the loop five times a second.
ALONE = {"QUEEN_SYNC_ENABLED": "false", "QUEEN_CACHE_REFRESH_INTERVAL_MS": "200"}


def memory(broker: Broker) -> tuple[bool, bool]:
    """What a broker believes, without having it look."""
    state = broker.request("GET", "/api/v1/system/shared-state").json()
    return state["maintenance_mode"], state["pop_maintenance_mode"]


def test_flags_agree_on_all_brokers_after_a_flip_also_where_one_was_down(brokers: Brokers) -> None:
    one, other, down = brokers(ALONE), brokers(ALONE), brokers(ALONE)
    down.kill()
    for path, enabled in ((PUSH, True), (POP, True), (PUSH, False)):
        assert one.request("POST", path, {"enabled": enabled}).status == 200
    wait_until(lambda: memory(other) == (False, True), 30, "the other broker knows")
    down.start(ALONE)
    wait_until(lambda: memory(down) == (False, True), 30, "the one that was down knows")
    assert down.request("POST", POP, {"enabled": False}).status == 200
    for broker in (one, other):
        wait_until(lambda b=broker: memory(b) == (False, False), 30, f"{broker.name} knows")  # type: ignore[misc]
    assert "reconcile: flag changed flag=pop_maintenance_mode from=false to=true" in other.log()


def test_workers_of_one_broker_agree(brokers: Brokers) -> None:
    broker = brokers({"QUEEN_CACHE_REFRESH_INTERVAL_MS": "200"}, workers=3)
    assert broker.request("POST", POP, {"enabled": True}).status == 200
    wait_until(lambda: all(memory(broker)[1] for _ in range(20)), 30, "every worker knows")


def test_a_pass_changes_nothing_while_the_database_is_away(lab: Lab) -> None:
    broker = lab.broker()
    broker.engine.flags.set(Flag.PUSH_MAINTENANCE, True)
    broker.connections.away = True
    with pytest.raises(Exception, match="away"):
        Reconcile(broker.engine).cycle()
    assert broker.engine.flags.push_maintenance
    broker.connections.away = False
    lab.execute("DELETE FROM queen.system_state")
    Reconcile(broker.engine).cycle()
    assert not broker.engine.flags.push_maintenance


def test_a_pass_finds_cursors_that_another_broker_moved(lab: Lab, queue: str) -> None:
    broker = lab.broker(POP_WAIT_MAX_INTERVAL_MS="600000")  # its own scans are hours away
    broker.accept(queue, "a")
    assert ids(broker.pop(queue, auto_ack=True)) == ["a"]
    Reconcile(broker.engine).cycle()
    waiting = gevent.spawn(broker.pop, queue, timeout=60.0)
    gevent.sleep(0.2)
    lab.seek(queue, at="2000-01-01T00:00:00Z")
    gevent.sleep(0.2)
    assert not waiting.ready()
    Reconcile(broker.engine).cycle()
    assert ids(waiting.get(timeout=30)) == ["a"]
