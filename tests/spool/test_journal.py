"""One worker's file: what is answered is in it, whatever the disk does."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gevent
import pytest

from queen.engine.frames import Frame
from queen.engine.identifiers import DEFAULT_TENANT
from queen.spool import records
from queen.spool.directory import SpoolDirectory, SpoolFull
from queen.spool.journal import Entry, Journal
from queen.spool.records import Event


class Spooled:
    """A journal in a directory, and what it was told to keep."""

    def __init__(self, path: Path, per_file: int = 1000, sync: bool = True, max_megabytes: int = 0) -> None:
        self.directory = SpoolDirectory(str(path), max_megabytes)
        self.directory.open("this")
        self.heard: list[Entry] = []
        self.journal = Journal(self.directory, per_file, sync, self.heard.append)
        self.accepted: list[Event] = []

    def write(self, name: str, size: int = 10, count: int = 1) -> bool:
        payload = b'"%s"' % (b"x" * size)
        names = [f"{name}-{k}".encode() for k in range(count)]
        events = [Event((DEFAULT_TENANT, b"q", b"p"), Frame(bytes(16), key, payload), 1) for key in names]
        try:
            self.journal.write(Entry(records.encode(events), count, {events[0].key}))
        except OSError:
            return False
        self.accepted += events
        return True

    def read(self) -> list[Event]:
        """All events of the files, which must be whole."""
        found: list[Event] = []
        for path in sorted(self.directory.path.glob("queen-*")):
            contents = records.parse(path.read_bytes())
            assert contents.fault is None
            found += contents.events
        return found

    def files(self, ending: str) -> list[str]:
        return sorted(path.name for path in self.directory.path.glob(f"queen-*.{ending}"))


@pytest.fixture
def spooled(tmp_path: Path) -> Spooled:
    return Spooled(tmp_path / "spool")


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """A disk that is full after so many bytes of a file: the write in which that happens is cut."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_entries_are_appended_in_order(spooled: Spooled) -> None:
    assert all(spooled.write(str(k), count=3) for k in range(5))
    assert spooled.read() == spooled.accepted
    assert len(spooled.files("tmp")) == 1
    assert [entry.stem for entry in spooled.heard] == [spooled.journal.stem] * 5


def test_those_who_wait_share_one_sync(spooled: Spooled) -> None:
    gevent.joinall([gevent.spawn(spooled.write, str(k)) for k in range(200)], raise_error=True)
    assert len(spooled.read()) == 200
    assert spooled.journal.syncs < 20


def test_a_new_file_begins_when_one_holds_enough(tmp_path: Path) -> None:
    spooled = Spooled(tmp_path, per_file=10)
    for k in range(5):
        spooled.write(str(k), count=5)
    assert [len(records.parse((tmp_path / n).read_bytes()).events) for n in spooled.files("buf")] == [10, 10]
    assert spooled.read() == spooled.accepted
    spooled.journal.finalise()
    assert len(spooled.files("buf")) == 3
    assert spooled.files("tmp") == []


def test_a_full_disk_fails_the_request_and_harms_nothing(spooled: Spooled) -> None:
    assert spooled.write("before", size=1000)
    with file_size_limit(5000):
        assert not spooled.write("too much", size=10_000)
        assert spooled.write("fits", size=1000)
        answers = [gevent.spawn(spooled.write, f"burst {k}", 1000) for k in range(10)]
        gevent.joinall(answers, raise_error=True)
        assert 0 < sum(answer.value for answer in answers) < 10
    assert spooled.write("after", size=10_000)
    assert sorted(e.frame.transaction_id for e in spooled.read()) == sorted(
        e.frame.transaction_id for e in spooled.accepted
    )


def test_a_failed_sync_fails_all_who_waited_and_begins_another_file(
    spooled: Spooled, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert spooled.write("before")
    first = spooled.journal.stem
    sync = os.fsync

    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    answers = [gevent.spawn(spooled.write, str(k)) for k in range(5)]
    gevent.joinall(answers)
    assert [answer.value for answer in answers] == [False] * 5
    monkeypatch.setattr(os, "fsync", sync)
    assert spooled.write("after")
    assert spooled.journal.stem != first
    # What was answered before is still there; the file is complete as soon as somebody looks after it.
    spooled.directory.adopt(spooled.journal.stem)
    assert f"{first}.buf" in spooled.files("buf")
    assert {e.frame.transaction_id for e in spooled.read()} >= {b"before-0", b"after-0"}


def test_the_configured_size_is_not_passed(tmp_path: Path) -> None:
    spooled = Spooled(tmp_path, max_megabytes=1)
    assert spooled.write("small")
    with pytest.raises(SpoolFull, match="FILE_BUFFER_MAX_MB=1"):
        spooled.journal.write(Entry(bytes(1 << 20), 1, set()))
    assert spooled.write("small again")


def test_a_little_of_the_disk_is_left_free(spooled: Spooled, monkeypatch: pytest.MonkeyPatch) -> None:
    class Disk:
        f_bavail, f_frsize = 100, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Disk)
    assert not spooled.write("a")
    monkeypatch.undo()
    assert spooled.write("b")


def test_an_unexpected_error_accepts_nothing(spooled: Spooled, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(spooled.directory, "room", fail)
    answers = [gevent.spawn(spooled.write, str(k)) for k in range(3)]
    gevent.joinall(answers)
    assert not any(answer.value for answer in answers)
    assert spooled.heard == []
    monkeypatch.undo()
    assert spooled.write("after")
