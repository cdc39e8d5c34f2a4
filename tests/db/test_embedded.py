"""The embedded PostgreSQL: what quickstart and the other tests stand on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from queen.db.embedded import DirectoryInUse, EmbeddedError, EmbeddedServer, Guard
from tests.broker import wait_until


def _count(server: EmbeddedServer) -> int:
    with psycopg.connect(server.dsn()) as connection:
        row = connection.execute("SELECT count(*) FROM kept").fetchone()
        assert row
        return int(row[0])


def _keep_a_row(server: EmbeddedServer) -> None:
    with psycopg.connect(server.dsn()) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS kept (i int)")
        connection.execute("INSERT INTO kept VALUES (1)")


@pytest.mark.parametrize("how", ["fast", "immediate", "kill"])
def test_data_survive_every_end(embedded: EmbeddedServer, how: str) -> None:
    for round_ in range(1, 4):
        _keep_a_row(embedded)
        if how == "kill":
            embedded.kill()
        else:
            embedded.stop(how)  # type: ignore[arg-type]
        assert not embedded.running
        embedded.start()
        assert _count(embedded) == round_


def test_nothing_is_traded_for_durability(embedded: EmbeddedServer) -> None:
    with psycopg.connect(embedded.dsn()) as connection:
        for setting in ("fsync", "synchronous_commit", "full_page_writes"):
            assert connection.execute(f"SHOW {setting}").fetchone() == ("on",)


def test_a_stale_pid_file_with_the_number_of_a_stranger_is_no_obstacle(embedded: EmbeddedServer) -> None:
    pid_file = embedded.cluster_dir / "postmaster.pid"
    content = pid_file.read_text()
    embedded.kill()
    with subprocess.Popen(["sleep", "60"]) as stranger:
        pid_file.write_text(content.replace(content.split()[0], str(stranger.pid), 1))
        embedded.start()
        assert stranger.poll() is None
        stranger.kill()


def test_only_one_server_on_a_directory(embedded: EmbeddedServer) -> None:
    with pytest.raises(DirectoryInUse):
        EmbeddedServer(embedded.data_dir).start()
    assert embedded.running


def test_a_taken_port_is_told_in_the_servers_words(embedded: EmbeddedServer, tmp_path: Path) -> None:
    other = EmbeddedServer(tmp_path, port=embedded.port)
    try:
        with pytest.raises(EmbeddedError, match="Address already in use"):
            other.start()
        assert not other.running
    finally:
        other.destroy()


def test_only_the_password_opens_it(embedded: EmbeddedServer) -> None:
    assert (embedded.data_dir / "password").stat().st_mode & 0o777 == 0o600
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(embedded.dsn(), password="wrong")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's server runs as another account")
def test_root_can_use_a_directory_that_no_one_else_may_enter(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    first = EmbeddedServer(tmp_path / "data")
    try:
        first.start()
        _keep_a_row(first)
        first.stop()
        second = EmbeddedServer(tmp_path / "data")
        assert second.data_dir == first.data_dir != second.requested_dir
        with second:
            assert _count(second) == 1
    finally:
        first.destroy()


def test_it_goes_when_its_owner_is_killed_and_comes_back(embedded: EmbeddedServer) -> None:
    _keep_a_row(embedded)
    embedded.stop()
    program = (
        "import pathlib, sys, time\n"
        "from queen.db.embedded import EmbeddedServer\n"
        "server = EmbeddedServer(pathlib.Path(sys.argv[1]), bin_dir=pathlib.Path(sys.argv[2]))\n"
        "server.start(); print(server.pid, flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(embedded.data_dir), str(embedded.bin_dir)],
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout
        postmaster = int(owner.stdout.readline())
        owner.kill()
    wait_until(lambda: not Path(f"/proc/{postmaster}").exists(), what="the orphan is gone")
    embedded.start()
    assert _count(embedded) == 1


def test_a_dismissed_guard_leaves_the_child_alone() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        Guard(child.pid, signal.SIGTERM).dismiss()
        os.kill(child.pid, 0)
        assert child.poll() is None
        child.kill()
