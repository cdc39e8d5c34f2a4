"""Deduplication is exact, whatever the brokers' caches know, forget or believe."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gevent
import pytest
from gevent.event import Event
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from queen.db.records import HashRow
from queen.engine.identifiers import NO_MESSAGE, fingerprint
from tests.engine.conftest import TENANT, Lab, LocalBroker, append, together
from tests.faults.log_check import Log

WINDOW = 3600
KEYS = [f"id-{k}" for k in range(12)]

# What the two brokers of a run are set to.
CACHES: dict[str, list[dict[str, str]]] = {
    "on": [{}, {}],
    "off": [{"QUEEN_DEDUP_CACHE": "0"}] * 2,
    "one of two": [{}, {"QUEEN_DEDUP_CACHE": "0"}],
    "suppressed": [{"QUEEN_DEDUP_CACHE_MB": "1"}] * 2,
}

_queues = itertools.count(1)


@dataclass
class Model:
    """What SQL must decide: where each id lies, when it was written and whether it can still be read."""

    window: int = WINDOW
    now: float = 0.0  # moves only when the test makes everything older
    last: int = -1
    places: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    message_ids: dict[int, str] = field(default_factory=dict)

    def push(self, keys: list[str]) -> list[tuple[str, str | None]]:
        """Return status and expected message id (None: a new one) of each item."""
        verdicts: list[tuple[str, str | None]] = []
        leaders: dict[str, tuple[str, str | None]] = {}
        for key in keys:
            if key in leaders:
                verdicts.append(("duplicate", leaders[key][1]))
                continue
            found = [off for off, at in self.places.get(key, []) if self.now - at < self.window]
            verdict: tuple[str, str | None] = ("queued", None)
            if found:
                verdict = ("duplicate", self.message_ids.get(min(found), NO_MESSAGE))
            leaders[key] = verdict
            verdicts.append(verdict)
        return verdicts

    def stored(self, key: str, message_id: str) -> None:
        self.last += 1
        self.places.setdefault(key, []).append((self.last, self.now))
        self.message_ids[self.last] = message_id


@dataclass
class Run:
    """Two brokers and the model, on one partition."""

    lab: Lab
    brokers: list[LocalBroker]
    queue: str
    model: Model = field(default_factory=Model)

    def push(self, who: int, keys: list[str]) -> None:
        expected = self.model.push(keys)
        outcomes = self.brokers[who].push(self.queue, *keys)
        assert [o.status for o in outcomes] == [status for status, _ in expected]
        leaders: dict[str, str] = {}
        for key, outcome, (status, message_id) in zip(keys, outcomes, expected, strict=True):
            if status == "queued":
                self.model.stored(key, outcome.message_id)
                leaders[key] = outcome.message_id
            else:
                assert outcome.message_id == (message_id or leaders[key])
        gevent.sleep(0)  # what the push started behind itself

    def restart(self, who: int) -> None:
        """A broker comes back knowing nothing of the queue."""
        cache = self.brokers[who].engine.pusher.dedup
        cache.drop_queue(TENANT, self.queue.encode())
        cache._suppressed.clear()

    def configure(self, window: int) -> None:
        self.lab.configure(self.queue, dedupWindowSeconds=window)
        self.model.window = window

    def grow_old(self) -> None:
        """Two windows pass."""
        if self.model.last >= 0:
            self.lab.age(self.queue, 2 * WINDOW)
        self.model.now += 2 * WINDOW

    def recreate(self) -> None:
        self.lab.delete_queue(self.queue)
        self.lab.configure(self.queue, dedupWindowSeconds=self.model.window)
        self.model = Model(self.model.window, self.model.now)

    def remove(self) -> None:
        """Retention removes what is stored, but not the hashes."""
        if self.model.last >= 0:
            self.lab.drop_front(self.queue, self.model.last + 1)
        self.model.message_ids.clear()


STEPS = st.one_of(
    st.tuples(st.just("push"), st.integers(0, 1), st.lists(st.sampled_from(KEYS), min_size=1, max_size=4)),
    st.tuples(st.just("push"), st.integers(0, 1), st.lists(st.sampled_from(KEYS), min_size=1, max_size=20)),
    st.tuples(st.just("push"), st.integers(0, 1), st.lists(st.sampled_from(KEYS), min_size=1, max_size=2)),
    st.tuples(st.just("restart"), st.integers(0, 1)),
    st.tuples(st.just("configure"), st.sampled_from([0, WINDOW, 4 * WINDOW])),
    st.tuples(st.just("grow_old")),
    st.tuples(st.just("recreate")),
    st.tuples(st.just("remove")),
)


@pytest.mark.parametrize("caches", CACHES)
def test_every_push_is_judged_as_the_model_does(lab: Lab, caches: str) -> None:
    brokers = [lab.broker(**variables) for variables in CACHES[caches]]
    if caches == "suppressed":
        for number, broker in enumerate(brokers):
            fill(lab, broker, f"filler-{number}")

    @settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(STEPS, min_size=3, max_size=25))
    def run(steps: list[tuple[Any, ...]]) -> None:
        state = Run(lab, brokers, f"dedup-{next(_queues)}")
        state.configure(WINDOW)
        for name, *arguments in steps:
            getattr(state, name)(*arguments)
        log = [m for m in Log.read(lab.sql).messages if m.queue == state.queue]
        assert {m.offset: m.message_id for m in log} == state.model.message_ids
        lab.delete_queue(state.queue)

    run()
    if caches == "suppressed":
        assert all(broker.engine.pusher.dedup.suppressed for broker in brokers)


def fill(lab: Lab, broker: LocalBroker, queue: str) -> None:
    """Fill a broker's cache with what can't be evicted."""
    cache = broker.engine.pusher.dedup
    broker.accept(queue, *(f"m{k}" for k in range(1_000)))
    (entry,) = cache._entries.values()
    entry.used = float("inf")
    cache._cap = cache.size
    lab.delete_queue(queue)


@pytest.mark.parametrize("cache", ["1", "0"])
def test_an_id_is_taken_again_once_its_window_is_over(lab: Lab, queue: str, cache: str) -> None:
    broker = lab.broker(QUEEN_DEDUP_CACHE=cache)
    lab.configure(queue, dedupWindowSeconds=1)
    broker.accept(queue, "a", "b")
    lab.age(queue, 0.5)
    assert broker.push(queue, "a")[0].status == "duplicate"
    lab.age(queue, 1)
    broker.accept(queue, "a")
    assert broker.push(queue, "a")[0].status == "duplicate"


def test_a_window_that_really_passes_ends_it_too(lab: Lab, queue: str, broker: LocalBroker) -> None:
    lab.configure(queue, dedupWindowSeconds=1)
    (first,) = broker.accept(queue, "a")

    def accepted_again() -> bool:
        gevent.sleep(0.05)
        (outcome,) = broker.push(queue, "a")
        assert outcome.status == "queued" or outcome.message_id == first
        return outcome.status == "queued"

    with gevent.Timeout(10):
        while not accepted_again():
            pass
    written = [m.created_at for m in Log.read(lab.sql).messages if m.queue == queue]
    assert (written[1] - written[0]).total_seconds() > 1


def test_one_partitions_ids_are_no_business_of_anothers(lab: Lab, queue: str, broker: LocalBroker) -> None:
    assert [o.status for o in broker.push_items([(queue, p, "a") for p in "xyz"])] == ["queued"] * 3
    assert broker.push(queue, "a", partition="y")[0].status == "duplicate"


def test_window_zero_asks_nobody_but_still_writes_hashes(lab: Lab, queue: str, broker: LocalBroker) -> None:
    lab.configure(queue, dedupWindowSeconds=0)
    for _ in range(3):
        broker.accept(queue, "a")
    assert lab.one("SELECT count(*) FROM queen.log_txns WHERE partition_id = %s", lab.partition_id(queue)) == 3


def found(lab: Lab, queue: str, hashes: bytes, first: int, last: int) -> dict[int, int]:
    """Ask SQL which hashes occur in a range of offsets; returns the lowest offset by position."""
    rows = lab.rows(
        "SELECT * FROM queen.log_find_hashes(%s::uuid, %s::bytea, %s, %s, '-infinity')",
        lab.partition_id(queue),
        hashes,
        first,
        last,
    )
    return {row.i: row.off for row in rows}


def test_many_hashes_are_found_as_few_are(lab: Lab, queue: str) -> None:
    """SQL has two ways to look, by how many are asked for."""
    lab.configure(queue, dedupWindowSeconds=0)
    for k in range(0, 60, 3):
        append(lab.operations, queue, f"k{k}", f"k{k + 1}", f"k{k + 2}")
    append(lab.operations, queue, "k7", "k50")
    wanted = [fingerprint(key.encode()) for key in ("new", *(f"k{k}" for k in range(59, 1, -2)), "newer")]
    for first, last in ((0, 61), (7, 60), (8, 61), (30, 30), (61, 61)):
        one_by_one = {k: off for k, h in enumerate(wanted) for off in found(lab, queue, h, first, last).values()}
        assert found(lab, queue, b"".join(wanted), first, last) == one_by_one
    assert found(lab, queue, wanted[27], 0, 61) == {0: 7}
    assert found(lab, queue, wanted[27], 8, 61) == {0: 60}


def test_hashes_that_overlap_two_others_are_no_match(lab: Lab, queue: str, broker: LocalBroker) -> None:
    """The bytes asked for lie in a hash row, but across two hashes."""
    broker.accept(queue, "a", "b")
    (pair,) = lab.rows("SELECT hashes FROM queen.log_txns WHERE partition_id = %s", lab.partition_id(queue))
    assert found(lab, queue, pair.hashes[8:24], 0, 1) == {}
    assert found(lab, queue, pair.hashes, 0, 1) == {0: 0, 1: 1}
    assert found(lab, queue, pair.hashes, 1, 1) == {1: 1}


# The cache: that it saves the probe when it may, and vouches for nothing when it may not.


def vouched(broker: LocalBroker, queue: str, key: str = "unheard of") -> int:
    """Return how far a broker vouches for an id in the partition Default."""
    cache = broker.engine.pusher.dedup
    lane = next((k for k in cache._entries if k[1] == queue.encode()), None)
    return -1 if lane is None else cache.vouch(lane, [key.encode().ljust(16)[:16]]).verified


def test_a_warm_cache_vouches_for_everything(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, *(f"m{k}" for k in range(50)))
    broker.accept(queue, "one more")
    assert vouched(broker, queue) == lab.partition(queue).last_offset == 50


def test_a_cold_cache_reads_the_window_and_then_vouches(lab: Lab, queue: str) -> None:
    append(lab.operations, queue, *KEYS)
    cold = lab.broker()
    cold.accept(queue, "x")
    assert cold.push(queue, "id-3")[0].status == "duplicate"
    with gevent.Timeout(5):
        while vouched(cold, queue) < 0:
            gevent.sleep(0.005)
    assert vouched(cold, queue) == len(KEYS)
    cold.accept(queue, "y")
    assert vouched(cold, queue) == lab.partition(queue).last_offset


def test_a_gap_leaves_the_vouch_where_it_was(lab: Lab, queue: str) -> None:
    first, second = lab.broker(), lab.broker()
    first.accept(queue, "a")
    second.accept(queue, "b")
    first.accept(queue, "c")
    assert vouched(first, queue) == 0
    assert [o.status for o in first.push(queue, "b", "c")] == ["duplicate"] * 2


def held_back(broker: LocalBroker, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Keep what a broker reads for its cache in the air; returns what lets it arrive."""
    read = broker.operations.hashes_since
    may_arrive = Event()
    flights: list[gevent.Greenlet[..., Any]] = []

    def slow(*arguments: Any) -> list[HashRow]:
        rows = read(*arguments)
        flights.append(gevent.getcurrent())  # type: ignore[arg-type]
        may_arrive.wait()
        return rows

    def arrive() -> None:
        monkeypatch.setattr(broker.operations, "hashes_since", read)
        gevent.sleep(0.05)
        may_arrive.set()
        gevent.joinall(flights)

    monkeypatch.setattr(broker.operations, "hashes_since", slow)
    return arrive


def test_what_was_read_for_a_small_window_fills_no_entry_of_a_larger_one(
    lab: Lab, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.configure(queue, dedupWindowSeconds=10)
    append(lab.operations, queue, "old")
    lab.age(queue, 60)
    broker = lab.broker()
    arrive = held_back(broker, monkeypatch)
    broker.accept(queue, "a")
    gevent.sleep(0.05)
    lab.configure(queue, dedupWindowSeconds=WINDOW)
    broker.accept(queue, "b")
    arrive()
    assert broker.push(queue, "old")[0].status == "duplicate"


def test_what_was_read_to_close_a_gap_begins_no_new_entry(
    lab: Lab, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = lab.broker()
    broker.accept(queue, "old")
    for k in range(3):
        append(lab.operations, queue, *(f"{k}-{n}" for n in range(1000)))
    arrive = held_back(broker, monkeypatch)
    broker.accept(queue, "a")  # asks for everything from offset 1 on
    gevent.sleep(0.05)
    broker.engine.pusher.dedup.drop_queue(TENANT, queue.encode())
    broker.accept(queue, "b")  # begins an entry that knows nothing yet
    arrive()
    assert broker.push(queue, "old")[0].status == "duplicate"


def test_a_gap_older_than_the_window_does_not_end_the_cache(lab: Lab, queue: str) -> None:
    """The broker was idle for longer than the window while another one pushed."""
    lab.configure(queue, dedupWindowSeconds=10)
    broker = lab.broker()
    broker.accept(queue, "a")
    for k in range(3):
        append(lab.operations, queue, *(f"{k}-{n}" for n in range(1000)))
    lab.age(queue, 60)
    broker.accept(queue, "b")
    gevent.sleep(0.05)
    broker.accept(queue, "c")
    with gevent.Timeout(5):
        while vouched(broker, queue) < lab.partition(queue).last_offset:
            broker.push_items([(queue, "Default", None)])
            gevent.sleep(0.01)


def test_a_deleted_partitions_cache_vouches_for_nothing_in_its_successor(lab: Lab, queue: str) -> None:
    broker = lab.broker()
    broker.accept(queue, *KEYS)
    lab.delete_queue(queue)
    append(lab.operations, queue, "id-5", "z")
    statuses = [o.status for o in broker.push(queue, "z", "id-5", "id-6")]
    assert statuses == ["duplicate", "duplicate", "queued"]


def test_the_cache_stays_below_its_cap_and_suppresses_what_does_not_fit(lab: Lab, queue: str) -> None:
    broker = lab.broker(QUEEN_DEDUP_CACHE_MB="1")
    cache = broker.engine.pusher.dedup
    for k in range(1000):
        broker.push_items([(queue, f"p{k % 3}", None) for _ in range(2000)])
        assert cache.size <= 1_000_000
        if cache.suppressed:
            break
    assert cache.suppressed > 0
    repeated = broker.push_items([(queue, f"p{k}", "again") for k in range(3)])
    assert [o.status for o in repeated] == ["queued"] * 3
    repeated = broker.push_items([(queue, f"p{k}", "again") for k in range(3)])
    assert [o.status for o in repeated] == ["duplicate"] * 3


def test_old_hashes_in_tables_are_known_as_recent_ones_are(lab: Lab, queue: str) -> None:
    """The recent hashes may take a quarter of the megabyte, which some two thousand do; the rest is in tables."""
    broker = lab.broker(QUEEN_DEDUP_CACHE_MB="1")
    for k in range(20):
        broker.accept(queue, *(f"{k}-{n}" for n in range(1000)))
    cache = broker.engine.pusher.dedup
    (entry,) = cache._entries.values()
    assert entry.older is not None
    assert entry.older.count + len(entry.recent) == 20_000
    assert entry.verified == lab.partition(queue).last_offset
    for k in range(20):
        (first, fresh) = broker.push(queue, f"{k}-{50 * k}", f"fresh-{k}")
        assert (first.status, fresh.status) == ("duplicate", "queued")


def test_brokers_that_push_the_same_at_once_agree(lab: Lab, queue: str) -> None:
    brokers = [lab.broker(), lab.broker(QUEEN_DEDUP_CACHE="0"), lab.broker(QUEEN_DEDUP_CACHE_MB="1")]

    def pusher(broker: LocalBroker) -> Callable[[], list[tuple[str, str]]]:
        def run() -> list[tuple[str, str]]:
            answers = []
            for k in range(40):
                (outcome,) = broker.push(queue, f"id-{k}")
                answers.append((outcome.status, outcome.message_id))
            return answers

        return run

    answers = together(*(pusher(broker) for broker in brokers * 2))
    for same in zip(*answers, strict=True):
        assert sorted(status for status, _ in same) == ["duplicate"] * 5 + ["queued"]
        assert len({message_id for _, message_id in same}) == 1
    assert Log.read(lab.sql).repeats(queue) == []
