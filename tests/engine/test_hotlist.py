"""The ring of candidates, state by state, and the verdicts of a claim that keep it right."""

from __future__ import annotations

import time
from typing import Any

import gevent
import pytest

from queen.db.records import Claimed, Flow, ListPop, Subscription, Terms
from queen.engine.hotlist import HotList, Ring, State
from queen.engine.waiting import Parked
from tests.engine.conftest import GROUP, TENANT, Lab, LocalBroker, append, ids

EPOCH_2000 = 946_684_800
PAST = -1


# Verdicts.


def claim(
    lab: Lab, queue: str, *names: str, batch: int = 100, cap: int = 0, lease: int = 60, **more: Any
) -> list[Claimed]:
    """Claim from candidates as a ring does, for a group that is registered."""
    terms = Terms(more.get("worker", "W").encode(), batch, cap, lease, more.get("auto_ack", False))
    candidates = [name.encode() for name in names]
    pop = ListPop(
        TENANT,
        queue.encode(),
        GROUP.encode(),
        candidates,
        [0] * len(names),
        [PAST] * len(names),
        terms,
        more.get("debounced", False),
    )
    return lab.operations.pop_list(pop, Subscription(GROUP.encode(), b"all", b""))


def verdicts(rows: list[Claimed]) -> list[tuple[str, str]]:
    return [(row.partition.decode(), row.verdict.decode()) for row in rows]


def seconds_until(row: Claimed) -> float:
    assert row.until is not None
    return row.until / 1e6 - (time.time() - EPOCH_2000)


def test_served_in_the_order_of_the_candidates_with_the_last_offset(lab: Lab, queue: str) -> None:
    for name in ("a", "b", "c"):
        append(lab.operations, queue, "m0", "m1", "m2", partition=name)
        append(lab.operations, queue, "m3", "m4", partition=name)
    rows = claim(lab, queue, "c", "a", "b", batch=12)
    took = [(r.partition, r.base, r.start, r.take, r.batch_end, r.last_offset) for r in rows]
    assert took == [
        (b"c", 0, 0, 3, 4, 4),
        (b"c", 3, 0, 2, 4, 4),
        (b"a", 0, 0, 3, 4, 4),
        (b"a", 3, 0, 2, 4, 4),
        (b"b", 0, 0, 2, 1, 4),
    ]
    assert all(59 < seconds_until(row) <= 60 for row in rows)
    lab.expire_leases(queue)
    lab.execute("UPDATE queen.log_consumers SET committed = 1 WHERE partition_id = %s", lab.partition_id(queue, "b"))
    rows = claim(lab, queue, "b", "b", "b")
    assert [(r.base, r.start, r.take) for r in rows] == [(0, 2, 1), (3, 0, 2)]


def test_nothing_pending_and_no_partition_are_empty(lab: Lab, queue: str) -> None:
    append(lab.operations, queue, "m0", partition="a")
    assert verdicts(claim(lab, queue, "a", auto_ack=True)) == [("a", "took")]
    rows = claim(lab, queue, "a", "nobody", "a")
    assert sorted(set(verdicts(rows))) == [("a", "empty"), ("nobody", "empty")]
    assert verdicts(claim(lab, f"{queue}-nobody", "a")) == [("a", "empty")]


def test_a_live_lease_says_until_when(lab: Lab, queue: str) -> None:
    append(lab.operations, queue, "m0", partition="a")
    claim(lab, queue, "a", lease=40)
    (row,) = claim(lab, queue, "a", worker="V")
    assert row.verdict == b"leased"
    assert 39 < seconds_until(row) <= 40


DEFERRALS: dict[str, str] = {
    "locked": "SELECT 1 FROM queen.log_consumers FOR UPDATE",
    "being created": "SELECT pg_advisory_xact_lock(hashtextextended(id::text || '/g', 42)) FROM queen.log_partitions",
    "delayed": "UPDATE queen.queues SET delayed_processing = 100; COMMIT",
    "debounced": "UPDATE queen.queues SET window_buffer = 100; COMMIT",
}


@pytest.mark.parametrize("why", DEFERRALS)
def test_pending_but_out_of_reach_is_a_short_lease_never_empty(lab: Lab, queue: str, why: str) -> None:
    """Called empty, it would be forgotten with all that it holds."""
    if why == "being created":
        append(lab.operations, queue, "m0", partition="before")
        claim(lab, queue, "before")
    append(lab.operations, queue, "m0", partition="a")
    if why != "being created":
        claim(lab, queue, "a")
        lab.expire_leases(queue)
    with lab.database.connect(autocommit=False) as other:
        other.execute(DEFERRALS[why].encode())
        (row,) = claim(lab, queue, "a")
        other.rollback()
    assert row.verdict == b"leased"
    assert 0.1 < seconds_until(row) <= 0.25
    lab.execute("UPDATE queen.queues SET delayed_processing = 0, window_buffer = 0")
    assert verdicts(claim(lab, queue, "a")) == [("a", "took")]


def test_who_debounced_already_is_not_debounced_again(lab: Lab, queue: str) -> None:
    lab.configure(queue, windowBuffer=100)
    append(lab.operations, queue, "m0", partition="a")
    assert verdicts(claim(lab, queue, "a", debounced=True)) == [("a", "took")]


@pytest.mark.parametrize(("batch", "cap"), [(2, 0), (100, 1)])
def test_what_budget_or_cap_left_out_has_no_verdict(lab: Lab, queue: str, batch: int, cap: int) -> None:
    for name in ("a", "b", "c"):
        append(lab.operations, queue, "m0", "m1", partition=name)
    assert verdicts(claim(lab, queue, "a", "b", "c", batch=batch, cap=cap)) == [("a", "took")]
    assert lab.cursor(queue, "b").worker_id is None


def test_a_group_without_registration_gets_one_with_its_cursors(lab: Lab, queue: str) -> None:
    for name in ("a", "b"):
        append(lab.operations, queue, "m0", partition=name)
    assert verdicts(claim(lab, queue, "a")) == [("a", "took")]
    assert lab.committed(queue, "b") == -1
    assert (
        lab.one(
            "SELECT count(*) FROM queen.consumer_groups_metadata m JOIN queen.queues q ON q.id = m.queue_id"
            " WHERE q.name = %s",
            queue,
        )
        == 1
    )


# The ring by itself.


class Scene:
    """A hot-list with one ring, and claims as SQL would answer."""

    def __init__(self, flow: Flow | None = None) -> None:
        self.hotlist = HotList()
        self.lane = self.hotlist.lane(TENANT, b"q")
        self.lane.flow = flow or Flow()
        self.ring: Ring = self.lane.ring(b"g")
        self.turning = gevent.spawn(self.hotlist.turn)

    def push(self, name: str = "p", count: int = 1, last: int = 0) -> None:
        self.hotlist.pushed((TENANT, b"q", name.encode()), last, count)

    def state(self, name: str = "p") -> State | None:
        entry = self.ring.entries.get(name.encode())
        return None if entry is None else entry.state

    def due(self, name: str = "p") -> float:
        return self.ring.entries[name.encode()].due - time.monotonic()

    def serve(
        self, *answers: tuple[str, str, int, int], lease: float = 60.0, auto_ack: bool = False, meanwhile: Any = None
    ) -> None:
        """Check out everything, and in again with (name, verdict, batch end, last offset)."""
        taken = self.hotlist.check_out(self.ring, 64, 1 << 30)
        assert all(entry.state is State.INFLIGHT for entry, _ in taken)
        if meanwhile is not None:
            meanwhile()
        until = int((time.time() + lease - EPOCH_2000) * 1e6)
        rows = [
            Claimed(n.encode(), v.encode(), n.encode().ljust(16), 0, 0, 1, 0, end, last, until, b"")
            for n, v, end, last in answers
        ]
        self.hotlist.check_in(self.ring, taken, rows, auto_ack)

    def ack(self, name: str = "p") -> None:
        self.hotlist.acked(name.encode().ljust(16), b"g", True)

    def nack(self, name: str = "p") -> None:
        self.hotlist.nacked(name.encode().ljust(16), b"g")


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Any:
    made = Scene(getattr(request, "param", None))
    yield made
    made.turning.kill()


def test_a_mark_makes_ready(scene: Scene) -> None:
    scene.push()
    assert scene.state() is State.READY
    scene.push()
    assert len(scene.ring.ready) == 1


@pytest.mark.parametrize("scene", [Flow(delayed_processing=5)], indirect=True)
def test_a_mark_of_a_delayed_queue_waits_for_the_delay(scene: Scene) -> None:
    scene.push()
    assert scene.state() is State.WHEEL
    assert 5 < scene.due() < 6
    scene.push(count=1000)
    assert scene.state() is State.WHEEL
    assert 5 < scene.due() < 6  # the first mark's, neither later nor sooner


@pytest.mark.parametrize("scene", [Flow(window_buffer=5)], indirect=True)
def test_a_mark_of_a_buffered_queue_waits_for_the_window_or_enough(scene: Scene) -> None:
    scene.push(count=50)
    assert scene.state() is State.WHEEL
    assert 4 < scene.due() <= 5
    scene.push(count=49)
    assert scene.state() is State.WHEEL
    scene.push()
    assert scene.state() is State.READY
    scene.push("other", count=100)
    assert scene.state("other") is State.READY


def test_served_and_leased_is_looked_at_again_within_a_second(scene: Scene) -> None:
    scene.push()
    scene.serve(("p", "took", 0, 0), lease=300)
    assert scene.state() is State.WHEEL
    assert scene.due() <= 1
    with gevent.Timeout(3):
        while scene.state() is not State.READY:
            gevent.sleep(0.01)


def test_a_drained_partition_is_forgotten_with_its_ack(scene: Scene) -> None:
    scene.push()
    scene.serve(("p", "took", 0, 0))
    scene.ack()
    assert scene.state() is None


@pytest.mark.parametrize("how", ["left over", "marked meanwhile", "marked in flight", "nacked"])
def test_what_is_left_is_ready_with_the_ack(scene: Scene, how: str) -> None:
    scene.push()
    in_flight = (lambda: scene.push(last=1)) if how == "marked in flight" else None
    scene.serve(("p", "took", 0, 1 if how == "left over" else 0), meanwhile=in_flight)
    if how == "marked meanwhile":
        scene.push(last=1)
    assert scene.state() is State.WHEEL
    scene.nack() if how == "nacked" else scene.ack()
    assert scene.state() is State.READY


def test_an_auto_ack_leaves_the_rest_ready(scene: Scene) -> None:
    scene.push("p")
    scene.push("q")
    scene.serve(("p", "took", 0, 5), ("q", "took", 5, 5), auto_ack=True)
    assert (scene.state("p"), scene.state("q")) == (State.READY, None)


def test_empty_is_forgotten_unless_it_was_marked_meanwhile(scene: Scene) -> None:
    scene.push()
    scene.serve(("p", "empty", -1, -1))
    assert scene.state() is None
    scene.push()
    scene.serve(("p", "empty", -1, -1), meanwhile=scene.push)
    assert scene.state() is State.READY


@pytest.mark.parametrize(("lease", "due"), [(0.1, 0.4), (0.5, 0.8), (300, 1.0)])
def test_leased_elsewhere_is_looked_at_again_and_never_forgotten(scene: Scene, lease: float, due: float) -> None:
    scene.push()
    scene.serve(("p", "leased", -1, 3), lease=lease)
    assert scene.state() is State.WHEEL
    assert due - 0.1 < scene.due() <= due + 0.01


def test_without_a_verdict_it_is_ready_again_at_the_front(scene: Scene) -> None:
    scene.push("p")
    scene.push("q")
    scene.serve(("p", "took", 0, 0), meanwhile=lambda: scene.push("late"))
    assert [entry.name for entry in scene.ring.ready] == [b"q", b"late"]


def test_a_check_out_stops_when_the_marks_cover_the_batch(scene: Scene) -> None:
    for name in ("a", "b", "c", "d"):
        scene.push(name, count=10)
    taken = scene.hotlist.check_out(scene.ring, 64, 15)
    assert [entry.name for entry, _ in taken] == [b"a", b"b"]
    assert len(scene.hotlist.check_out(scene.ring, 1, 100)) == 1


def test_a_mark_wakes_one_sleeper_of_each_ring(scene: Scene) -> None:
    other = scene.lane.ring(b"h")
    sleepers = [Parked() for _ in range(4)]
    for k, sleeper in enumerate(sleepers):
        (scene.ring if k < 2 else other).gate.add(sleeper)
    scene.push()
    assert [sleeper.woken for sleeper in sleepers] == [True, False, True, False]
    scene.push("another")
    assert all(sleeper.woken for sleeper in sleepers)


def test_a_group_that_moved_starts_over_and_no_other(scene: Scene) -> None:
    other = scene.lane.ring(b"h")
    scene.push()
    scene.ring.registered = other.registered = True
    scene.hotlist.forget_ring(scene.ring)
    assert (scene.state(), scene.ring.registered) == (None, False)
    assert (b"p" in other.entries, other.registered) == (True, True)


def test_a_stale_turn_of_the_wheel_promotes_nobody(scene: Scene) -> None:
    """A forgotten partition that comes again has nothing to do with the turn it left behind."""
    scene.push()
    scene.serve(("p", "leased", -1, 3), lease=0.01)
    scene.hotlist.forget_ring(scene.ring)
    scene.lane.flow = Flow(delayed_processing=100)
    scene.push()
    gevent.sleep(0.5)
    assert scene.state() is State.WHEEL


def test_an_idle_queue_is_swept_and_a_waited_for_one_is_not(scene: Scene) -> None:
    scene.push()
    parked = Parked()
    scene.ring.gate.add(parked)
    scene.hotlist.sweep(-1)
    assert (TENANT, b"q") in scene.hotlist.lanes
    scene.ring.gate.remove(parked)
    scene.hotlist.sweep(-1)
    assert (TENANT, b"q") not in scene.hotlist.lanes


# In the engine.


def test_an_idle_re_poll_asks_the_database_nothing(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, "a")
    broker.complete(broker.pop(queue))
    assert broker.pop(queue) == []
    calls: list[str] = []
    call = broker.connections.call

    def counted(statement: Any, *arguments: Any) -> Any:
        calls.append(statement.name)
        return call(statement, *arguments)

    broker.operations._call = counted
    for _ in range(20):
        assert broker.pop(queue) == []
    assert broker.pop(queue, timeout=0.15) == []
    assert [name for name in calls if name.startswith("pop")] == []
    broker.accept(queue, "b")
    assert ids(broker.pop(queue)) == ["b"]
    assert [name for name in calls if name.startswith("pop")] != []


def test_a_push_wakes_a_parked_pop_at_once(lab: Lab, queue: str) -> None:
    broker = lab.broker(POP_WAIT_MAX_INTERVAL_MS="60000", POP_WAIT_INITIAL_INTERVAL_MS="60000")
    lab.configure(queue, namespace=queue)
    broker.accept(queue, "warm")
    for group in ("a", "b", "c"):
        broker.drain(queue, group)
    pops = [
        gevent.spawn(broker.pop, queue, group="a", timeout=20),
        gevent.spawn(broker.pop, queue, "Default", group="b", timeout=20),
        gevent.spawn(broker.pop, None, namespace=queue, group="c", timeout=20),
    ]
    gevent.sleep(0.1)
    assert broker.engine.popper.parked == 3
    broker.accept(queue, "a")
    assert [ids(pop.get(timeout=1)) for pop in pops] == [["a"]] * 3
    assert broker.engine.popper.parked == 0


def test_an_ack_that_ends_a_lease_wakes_who_waits_for_the_rest(lab: Lab, queue: str) -> None:
    broker = lab.broker(POP_WAIT_MAX_INTERVAL_MS="60000", POP_WAIT_INITIAL_INTERVAL_MS="60000")
    lab.configure(queue, namespace=queue)
    for status in ("completed", "retry"):
        for arguments in ({"queue": queue}, {"queue": queue, "partition": "Default"}, {"namespace": queue}):
            broker.accept(queue, f"{status}{len(arguments)}{next(iter(arguments))}", "x" + status + str(arguments))
            messages = broker.pop(queue, "Default", batch=1)
            waiting = gevent.spawn(broker.pop, timeout=20, **arguments)
            gevent.sleep(0.05)
            assert not waiting.ready()
            broker.ack([(messages[0], status)])
            rest = waiting.get(timeout=0.8)
            assert rest[0].offset == messages[0].offset + (status == "completed")
            broker.complete(rest)


def test_a_claim_under_way_when_its_client_left_is_given_back(lab: Lab, queue: str, broker: LocalBroker) -> None:
    """Nobody saw the batch: the next pop gets it at once, and it counts as no delivery."""
    broker.accept(queue, "a")
    messages = broker.pop(queue)
    lab.operations.release_lease(
        messages[0].lease.encode(), GROUP.encode(), [bytes.fromhex(messages[0].partition_id.replace("-", ""))]
    )
    cursor = lab.cursor(queue)
    assert (cursor.worker_id, cursor.batch_end, cursor.attempt_count, cursor.committed) == (None, None, 0, -1)
    assert ids(broker.pop(queue, "Default")) == ["a"]
