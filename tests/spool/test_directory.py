"""The spool directory: whose it is, and what is done with its files."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from queen.spool.directory import SpoolDirectory, SpoolInUse


def opened(path: Path, broker: str = "this") -> SpoolDirectory:
    directory = SpoolDirectory(str(path))
    directory.open(broker)
    return directory


def test_it_is_made_for_the_broker_alone(tmp_path: Path) -> None:
    directory = opened(tmp_path / "a" / "spool")
    assert directory.ready
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert directory.failed.is_dir()
    descriptor, stem = directory.create()
    os.close(descriptor)
    assert stat.S_IMODE((directory.path / f"{stem}.tmp").stat().st_mode) == 0o600


def test_a_second_broker_is_refused_and_a_sibling_is_not(tmp_path: Path) -> None:
    first = opened(tmp_path)
    opened(tmp_path)
    with pytest.raises(SpoolInUse, match=f"FILE_BUFFER_DIR {tmp_path} is in use by another broker"):
        opened(tmp_path, "that")
    assert first.ready


def test_the_next_broker_gets_it_when_the_last_worker_is_gone(tmp_path: Path) -> None:
    code = f"from queen.spool.directory import SpoolDirectory; SpoolDirectory({str(tmp_path)!r}).open('gone')"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert opened(tmp_path, "next").ready


def test_one_that_cannot_be_made_has_a_substitute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    directory = opened(tmp_path / "file" / "spool")
    assert directory.path == tmp_path / "tmp" / "queen-buffers"
    assert directory.ready


def test_a_substitute_that_others_can_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "queen-buffers").mkdir()
    (tmp_path / "queen-buffers").chmod(0o777)
    assert "only this user can write to" in opened(tmp_path / "file" / "spool").fault


def test_without_a_substitute_the_fault_is_told_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file" / "tmp"))
    directory = opened(tmp_path / "file" / "spool")
    assert not directory.ready
    assert directory.fault == "Not a directory"
    with pytest.raises(OSError):
        directory.create()
    assert directory.complete() == []
    assert directory.sizes() == {}


def test_names_sort_by_age_even_when_the_clock_goes_back(tmp_path: Path) -> None:
    future = tmp_path / "queen-9999999999999-00000000-1.buf"
    future.write_bytes(b"")
    directory = opened(tmp_path)
    names = []
    for _ in range(3):
        descriptor, stem = directory.create()
        names.append(f"{stem}.buf")
        directory.finalise(stem)
        os.close(descriptor)
    assert directory.complete() == [future.name, *names]


def test_only_the_files_of_dead_workers_are_adopted(tmp_path: Path) -> None:
    code = (
        "from queen.spool.directory import SpoolDirectory; import sys, time\n"
        f"d = SpoolDirectory({str(tmp_path)!r}); d.open('this'); print(d.create()[1], flush=True); sys.stdin.read()"
    )
    worker = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None and worker.stdin is not None
    stem = worker.stdout.readline().strip()
    directory = opened(tmp_path)
    directory.adopt(None)
    assert directory.complete() == []
    worker.kill()
    worker.wait()
    worker.stdin.close()
    worker.stdout.close()
    directory.adopt(None)
    assert directory.complete() == [f"{stem}.buf"]


def test_a_file_is_set_aside_and_never_deleted(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    (tmp_path / "a.buf").write_bytes(b"a")
    assert directory.set_aside("a.buf") == directory.failed / "a.buf"
    (directory.failed / "a.buf").unlink()
    directory.failed.rmdir()
    (tmp_path / "b.buf").write_bytes(b"b")
    assert directory.set_aside("b.buf") == tmp_path / "b.bad"
    assert (tmp_path / "b.bad").read_bytes() == b"b"
    assert directory.complete() == []
