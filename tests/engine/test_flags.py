"""The maintenance flags as brokers remember them, and what pops do under one."""

from __future__ import annotations

from collections.abc import Iterator

import gevent
import pytest

from queen.db.errors import Unavailable
from queen.engine.flags import Flag
from tests.broker import wait_until
from tests.engine.conftest import Lab, LocalBroker, ids


@pytest.fixture(autouse=True)
def flags_off_again(lab: Lab) -> Iterator[None]:
    yield
    lab.execute("DELETE FROM queen.system_state")


def parked(broker: LocalBroker, count: int = 1) -> bool:
    gevent.sleep(0.01)
    return broker.engine.popper.parked == count


def test_a_flag_is_off_until_somebody_sets_it(broker: LocalBroker) -> None:
    assert broker.engine.flags.read() == []
    assert (broker.engine.flags.push_maintenance, broker.engine.flags.pop_maintenance) == (False, False)


def test_the_database_tells_another_broker_what_was_set(lab: Lab) -> None:
    one, other = lab.broker(), lab.broker()
    for flag in Flag:
        for enabled in (True, False):
            one.engine.flags.set(flag, enabled)
            assert one.engine.flags[flag] is enabled
            assert other.engine.flags.read() == [flag]
            assert other.engine.flags[flag] is enabled
            assert other.engine.flags.read() == []
    assert lab.rows("SELECT key, value FROM queen.system_state ORDER BY key") == [
        ("maintenance_mode", {"enabled": False}),
        ("pop_maintenance_mode", {"enabled": False}),
    ]


@pytest.mark.parametrize("value", ['{"enabled": "yes"}', "{}", "[]", "true", "null"])
def test_a_row_that_says_nothing_clear_is_off(lab: Lab, broker: LocalBroker, value: str) -> None:
    lab.execute("INSERT INTO queen.system_state (key, value) VALUES ('maintenance_mode', %s::jsonb)", value)
    broker.engine.flags.read()
    assert broker.engine.flags.push_maintenance is False


def test_without_the_database_a_flag_stays_as_it_is(broker: LocalBroker) -> None:
    broker.engine.flags.set(Flag.POP_MAINTENANCE, True)
    broker.connections.away = True
    for ask in (lambda: broker.engine.flags.set(Flag.POP_MAINTENANCE, False), broker.engine.flags.read):
        with pytest.raises(Unavailable):
            ask()
        assert broker.engine.flags.pop_maintenance is True


def test_an_answer_that_a_flip_overtook_is_asked_for_again(
    broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = broker.engine.flags
    ask = broker.operations.flags

    def slow() -> set[str]:
        answer = ask()
        if not flags.push_maintenance:
            flags.set(Flag.PUSH_MAINTENANCE, True)
        return answer

    monkeypatch.setattr(broker.engine.operations, "flags", slow)
    flags.read()
    assert flags.push_maintenance is True


def test_pops_that_do_not_wait_get_nothing(lab: Lab, broker: LocalBroker, queue: str) -> None:
    broker.accept(queue, "a")
    broker.engine.flags.set(Flag.POP_MAINTENANCE, True)
    assert broker.pop(queue) == []
    assert broker.pop(queue, partition="Default") == []
    assert broker.pop(namespace=queue) == []
    assert lab.rows("SELECT 1 FROM queen.log_consumers WHERE partition_id = %s", lab.partition_id(queue)) == []
    broker.engine.flags.set(Flag.POP_MAINTENANCE, False)
    assert ids(broker.pop(queue)) == ["a"]


def test_a_waiting_pop_sits_the_maintenance_out(broker: LocalBroker, queue: str) -> None:
    broker.accept(queue, "a")
    broker.engine.flags.set(Flag.POP_MAINTENANCE, True)
    waiting = gevent.spawn(broker.pop, queue, timeout=60.0)
    wait_until(lambda: parked(broker), what="the pop parks")
    broker.accept(queue, "b")  # its mark must not be served either
    gevent.sleep(0.05)
    assert parked(broker)
    broker.engine.flags.set(Flag.POP_MAINTENANCE, False)
    assert ids(waiting.get(timeout=30)) == ["a", "b"]


def test_a_pop_that_was_waiting_already_is_not_served_either(broker: LocalBroker, queue: str) -> None:
    waiting = gevent.spawn(broker.pop, queue, timeout=60.0)
    wait_until(lambda: parked(broker), what="the pop parks")
    broker.engine.flags.set(Flag.POP_MAINTENANCE, True)
    broker.accept(queue, "a")
    gevent.sleep(0.3)
    assert parked(broker)
    broker.engine.flags.set(Flag.POP_MAINTENANCE, False)
    assert ids(waiting.get(timeout=30)) == ["a"]


def test_a_waiting_pop_is_told_in_the_end_that_there_is_nothing(broker: LocalBroker, queue: str) -> None:
    broker.accept(queue, "a")
    broker.engine.flags.set(Flag.POP_MAINTENANCE, True)
    assert broker.pop(queue, timeout=0.1) == []
    waiting = gevent.spawn(broker.pop, queue, timeout=60.0)
    wait_until(lambda: parked(broker), what="the pop parks")
    broker.engine.stop()
    assert waiting.get(timeout=30) == []


def test_a_pop_that_fills_its_batch_claims_nothing_once_the_maintenance_begins(
    lab: Lab, broker: LocalBroker, queue: str
) -> None:
    lab.configure(queue, minPopWaitTime=60_000)
    broker.accept(queue, "a")
    assert ids(broker.pop(queue, batch=1)) == ["a"]  # first contact
    broker.accept(queue, "b", partition="p")
    waiting = gevent.spawn(broker.pop, queue, batch=100, timeout=60.0)
    gevent.sleep(0.1)
    broker.engine.flags.set(Flag.POP_MAINTENANCE, True)
    broker.accept(queue, *(f"c{k}" for k in range(200)), partition="p")  # ends the filling
    wait_until(lambda: parked(broker), what="the pop parks")
    broker.engine.flags.set(Flag.POP_MAINTENANCE, False)
    assert ids(waiting.get(timeout=30))[0] == "b"
