"""Sibling workers: where they meet, and that one of them, and only one, is the holder."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gevent
import pytest

from queen.engine.siblings import RunDirectoryError, Siblings, run_directory

LONG = 20.0

flock = fcntl.flock

# A worker in a process of its own, which says when it is the holder and then sleeps.
_HOLDER = """
import sys, time
from queen.engine.siblings import Siblings
siblings = Siblings(sys.argv[1])
siblings.start()
print("holder" if siblings.holder else "sibling", flush=True)
time.sleep(600)
"""


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[Siblings]]:
    """Three workers of one broker, the first of which was there first."""
    three = [Siblings(str(tmp_path / "run")) for _ in range(3)]
    for worker in three:
        worker.start()
    yield three
    for worker in three:
        worker.stop()


def test_the_first_worker_is_the_holder_at_once_and_nobody_else_is(workers: list[Siblings]) -> None:
    assert [worker.holder for worker in workers] == [True, False, False]
    assert workers[0].wait_holder(0)
    assert not workers[1].wait_holder(0.01)


def test_when_the_holder_stops_exactly_one_other_follows(workers: list[Siblings]) -> None:
    workers[0].stop()
    heirs = [gevent.spawn(worker.wait_holder) for worker in workers[1:]]
    gevent.wait(heirs, timeout=LONG, count=1)
    assert [worker.holder for worker in workers].count(True) == 1
    assert not workers[0].holder


def test_a_holder_that_is_killed_leaves_its_place(tmp_path: Path) -> None:
    directory = str(tmp_path / "run")
    with subprocess.Popen([sys.executable, "-c", _HOLDER, directory], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holder\n"
        worker = Siblings(directory)
        worker.start()
        assert not worker.holder
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert worker.wait_holder(LONG)
        worker.stop()


def test_brokers_with_directories_of_their_own_have_a_holder_each(tmp_path: Path) -> None:
    brokers = [Siblings(str(tmp_path / name)) for name in ("a", "b")]
    for broker in brokers:
        broker.start()
        assert broker.holder
    for broker in brokers:
        broker.stop()


def test_workers_have_names_of_their_own(workers: list[Siblings]) -> None:
    assert len({worker.instance for worker in workers}) == 3
    assert all(len(bytes.fromhex(worker.instance)) == 8 for worker in workers)


def test_the_directory_is_the_broker_users_alone(tmp_path: Path) -> None:
    path, temporary = run_directory(str(tmp_path / "a" / "run"))
    assert not temporary
    assert path.stat().st_mode & 0o777 == 0o700


def test_without_one_configured_systemd_names_it_or_the_master_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", f"{tmp_path}/one:{tmp_path}/two")
    assert run_directory("") == (tmp_path / "one", False)
    monkeypatch.delenv("RUNTIME_DIRECTORY")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_directory("") == (tmp_path / f"queen-{os.getuid()}" / str(os.getppid()), True)


def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    path.chmod(0o777)
    with pytest.raises(RunDirectoryError, match=f"QUEEN_RUN_DIR {path} must be a directory"):
        Siblings(str(path)).start()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_directory_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run"
    if kind == "file":
        path.touch()
    else:
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunDirectoryError, match="QUEEN_RUN_DIR"):
        Siblings(str(path)).start()


def test_a_temporary_directory_goes_with_the_last_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    workers = [Siblings() for _ in range(3)]
    for worker in workers:
        worker.start()
    (workers[0].directory / "another.sock").touch()
    workers[0].stop()
    with gevent.Timeout(LONG):
        while not any(worker.holder for worker in workers[1:]):
            gevent.sleep(0.01)
    assert [worker.holder for worker in workers].count(True) == 1
    (workers[0].directory / "another.sock").unlink()
    for worker in workers[1:]:
        worker.stop()
    assert not workers[0].directory.exists()


def test_a_lock_on_a_file_that_is_gone_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that opened the file just before the holder removed it must not be a second holder."""
    worker = Siblings(str(tmp_path / "run"))

    def too_late(lock: int, how: int) -> None:
        (worker.directory / "holder").unlink(missing_ok=True)
        flock(lock, how)

    with monkeypatch.context() as patched:
        patched.setattr("queen.engine.siblings.fcntl.flock", too_late)
        worker.start()
        assert not worker.holder
    assert worker.wait_holder(LONG)
    worker.stop()
