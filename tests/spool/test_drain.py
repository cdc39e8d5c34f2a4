"""The drain against a database of its own making: what it does when events are refused, or can't be stored now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from queen.db.errors import ConnectionLost, StatementFailed, Unavailable
from queen.engine import frames
from queen.engine.frames import Frame
from queen.engine.identifiers import DEFAULT_TENANT
from queen.engine.push import DUPLICATE, QUEUED, Group, PushRequest
from queen.spool import drain as drain_module
from queen.spool import records
from queen.spool.backlog import Backlog
from queen.spool.directory import SpoolDirectory
from queen.spool.drain import Drain
from queen.spool.records import Event

REFUSED = StatementFailed("refused", "P0001")


class Store:
    """In place of the pusher: keeps what it is given unless `verdict` has an error for the group."""

    def __init__(self) -> None:
        self.stored: list[str] = []
        self.requests: list[list[str]] = []
        self.verdict: Callable[[list[str]], Exception | None] = lambda keys: None

    def submit(self, request: PushRequest, groups: Sequence[Group]) -> None:
        request.expect(len(groups))
        for group in groups:
            assert group.replayed
            keys = [frames.decode(frame).transaction_id.decode() for frame in group.frames]
            self.requests.append(keys)
            group.error = self.verdict(keys)
            if group.error is None:
                for key, outcome in zip(keys, group.outcomes, strict=True):
                    outcome.status = DUPLICATE if key in self.stored else QUEUED
                    if outcome.status == QUEUED:
                        self.stored.append(key)
            request.settled()


class Spooled:
    """A directory with files, a drain, and a clock."""

    def __init__(self, path: Path, batch: int = 2) -> None:
        self.now = 1000.0
        self.directory = SpoolDirectory(str(path))
        self.directory.open("this")
        self.store = Store()
        self.drain = Drain(self.directory, Backlog(), self.store, batch)  # type: ignore[arg-type]

    def file(self, number: int, *keys: str) -> Path:
        events = [
            Event((DEFAULT_TENANT, b"q", key[:1].encode()), Frame(bytes(16), key.encode(), b"1"), 1) for key in keys
        ]
        path = self.directory.path / f"queen-{number:013d}-00000000-1.buf"
        path.write_bytes(records.encode(events))
        return path

    def run(self, times: int = 1) -> None:
        """Run as many cycles, an hour apart."""
        for _ in range(times):
            self.now += 3600
            self.drain.run(10)

    def aside(self) -> dict[str, list[str]]:
        return {
            path.name: [e.frame.transaction_id.decode() for e in records.parse(path.read_bytes()).events]
            for path in self.directory.failed.iterdir()
        }


@pytest.fixture
def spooled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spooled:
    spooled = Spooled(tmp_path)
    monkeypatch.setattr(drain_module.time, "monotonic", lambda: spooled.now)
    return spooled


def test_files_are_drained_in_the_order_of_their_names_and_deleted(spooled: Spooled) -> None:
    spooled.file(2, "c", "d")
    spooled.file(1, "a", "b", "a2")
    spooled.run()
    assert spooled.store.stored == ["a", "b", "a2", "c", "d"]
    assert spooled.directory.complete() == []
    assert spooled.aside() == {}


def test_what_can_not_be_stored_now_waits_and_goes_on_where_it_stood(spooled: Spooled) -> None:
    path = spooled.file(1, "a1", "a2", "a3", "a4")
    for error in (Unavailable("away"), ConnectionLost("lost"), StatementFailed("read-only", "25006")):
        spooled.store.verdict = lambda keys, error=error: error if "a3" in keys else None  # type: ignore[misc]
        spooled.run(20)
    assert path.exists()
    assert spooled.store.stored == ["a1", "a2"]
    assert spooled.store.requests.count(["a1", "a2"]) == 1
    spooled.store.verdict = lambda keys: None
    spooled.run()
    assert spooled.store.stored == ["a1", "a2", "a3", "a4"]
    assert not path.exists()


def test_after_ten_failures_in_a_row_it_pauses(spooled: Spooled) -> None:
    spooled.file(1, "a")
    spooled.store.verdict = lambda keys: Unavailable("away")
    for _ in range(30):
        spooled.drain.run(10)
    assert len(spooled.store.requests) == 10
    spooled.now += 5.1
    spooled.drain.run(10)
    assert len(spooled.store.requests) == 11


def test_what_is_refused_is_set_aside_in_the_end_and_the_rest_is_stored(spooled: Spooled) -> None:
    path = spooled.file(1, "a1", "b1", "x", "a2", "a3")
    spooled.file(2, "c")
    spooled.store.verdict = lambda keys: REFUSED if "x" in keys else None
    spooled.run(4)
    assert path.exists()
    assert spooled.store.stored == ["a1", "b1", "a2"], "nothing goes past what may yet be taken"
    spooled.run(1)
    assert spooled.store.stored == ["a1", "b1", "a2", "a3", "c"]
    assert spooled.aside() == {path.name: ["x"]}
    assert spooled.directory.complete() == []


def test_attempts_to_store_what_is_refused_take_ever_more_time(spooled: Spooled) -> None:
    spooled.file(1, "x")
    spooled.store.verdict = lambda keys: REFUSED
    times = []
    for _ in range(200):
        before = len(spooled.store.requests)
        spooled.now += 0.1
        spooled.drain.run(10)
        if len(spooled.store.requests) > before:
            times.append(spooled.now)
    assert [round(b - a) for a, b in pairwise(times)] == [1, 2, 4, 8]


def test_a_refusal_that_passes_is_forgotten(spooled: Spooled) -> None:
    spooled.file(1, "x")
    spooled.store.verdict = lambda keys: REFUSED
    spooled.run(4)
    spooled.store.verdict = lambda keys: None
    spooled.run()
    assert spooled.store.stored == ["x"]
    assert spooled.aside() == {}


def test_an_outage_in_the_last_attempt_loses_no_refused_event(spooled: Spooled) -> None:
    spooled.file(1, "x", "a", "b", "c")
    spooled.store.verdict = lambda keys: REFUSED if "x" in keys else None
    spooled.run(4)
    spooled.store.verdict = lambda keys: REFUSED if "x" in keys else Unavailable("away") if "b" in keys else None
    spooled.run(3)
    assert spooled.aside() == {}
    spooled.store.verdict = lambda keys: None
    spooled.run()
    assert sorted(spooled.store.stored) == ["a", "b", "c"]
    assert list(spooled.aside().values()) == [["x"]]


@pytest.mark.parametrize("cut", [1, 40, 4096])
def test_a_damaged_file_gives_what_it_can_and_is_kept(spooled: Spooled, cut: int) -> None:
    path = spooled.file(1, "a", "b", "c")
    data = path.read_bytes()
    path.write_bytes(data[:-cut] if cut < len(data) else data + bytes(cut))
    spooled.run()
    assert spooled.store.stored == (["a", "b"] if cut < len(data) else ["a", "b", "c"])
    assert list(spooled.aside()) == [path.name]
    assert spooled.directory.complete() == []


def test_foreign_files_are_no_obstacle(spooled: Spooled) -> None:
    (spooled.directory.path / "notes.txt").write_text("hello")
    (spooled.directory.path / "0-foreign.buf").write_bytes(b"this is no spool file")
    (spooled.directory.path / "1-folder.buf").mkdir()
    (spooled.directory.path / "2-empty.buf").touch()
    spooled.file(1, "a")
    spooled.run(6)
    assert spooled.store.stored == ["a"]
    assert (spooled.directory.path / "notes.txt").exists()
    assert (spooled.directory.failed / "0-foreign.buf").exists()
    assert (spooled.directory.failed / "1-folder.buf").exists()
    assert spooled.directory.complete() == []


def test_a_file_that_can_not_be_moved_is_left_out_and_not_deleted(
    spooled: Spooled, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = spooled.file(1, "x")
    spooled.file(2, "a")
    spooled.store.verdict = lambda keys: REFUSED if "x" in keys else None

    def fail(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(SpoolDirectory, "keep", fail)
    monkeypatch.setattr(SpoolDirectory, "set_aside", lambda self, name: None)
    spooled.run(6)
    assert spooled.store.stored == ["a"]
    assert path.exists()
