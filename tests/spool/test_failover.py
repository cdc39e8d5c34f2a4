"""A standby is promoted in place of the primary, and the broker goes on with it by itself."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from queen.db.embedded import EmbeddedServer
from tests.broker import Broker, wait_until
from tests.conftest import Brokers
from tests.spool.conftest import consume, item, wait_drained


@pytest.fixture
def standby(embedded: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """A streaming standby of the test's server."""
    directory = Path(tempfile.mkdtemp(prefix="queen-test-pg-"))
    server = EmbeddedServer(directory, bin_dir=embedded.bin_dir)
    try:
        follow(server, embedded)
        yield server
    finally:
        server.destroy()


def follow(server: EmbeddedServer, primary: EmbeddedServer) -> None:
    """Makes a server a streaming standby of another, and starts it."""
    account = Path(primary.cluster_dir).stat()
    assert primary.bin_dir is not None
    (server.data_dir / "password").write_text(primary.password)
    os.chown(server.data_dir / "password", account.st_uid, account.st_gid)
    subprocess.run(
        [primary.bin_dir / "pg_basebackup", "-d", primary.dsn(), "-D", server.cluster_dir, "-R", "-c", "fast"],
        check=True,
        cwd=server.data_dir,
        user=account.st_uid,
        group=account.st_gid,
    )
    server.start()


def both(*servers: EmbeddedServer) -> dict[str, str]:
    """What points a broker at several servers."""
    return servers[0].environment() | {
        "PG_HOST": ",".join(server.host for server in servers),
        "PG_PORT": ",".join(str(server.port) for server in servers),
    }


def caught_up(primary: EmbeddedServer) -> bool:
    with psycopg.connect(primary.dsn()) as connection:
        row = connection.execute(
            "SELECT bool_and(replay_lsn >= pg_current_wal_lsn()) FROM pg_stat_replication"
        ).fetchone()
    return row is not None and bool(row[0])


def promote(server: EmbeddedServer) -> None:
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("SELECT pg_promote()")


def queued(broker: Broker, key: str) -> bool:
    return broker.push([item(key)])[0]["status"] in ("queued", "duplicate")


def test_a_promoted_standby_is_followed(brokers: Brokers, embedded: EmbeddedServer, standby: EmbeddedServer) -> None:
    broker = brokers(postgres=both(standby, embedded))
    broker.push([item("before")])
    wait_until(lambda: caught_up(embedded), 30, "the standby has everything")
    embedded.stop("immediate")
    # The standby that is left only reads: that is no reason to give anything up.
    for k in range(5):
        assert broker.push([item(f"m{k}")])[0]["status"] == "buffered"
    assert broker.request("GET", "/health").status == 503
    promote(standby)
    wait_drained(broker)
    wait_until(lambda: queued(broker, "after"), 30, "a push is stored")
    wait_until(lambda: broker.request("GET", "/health").status == 200, 30, "it is healthy")
    assert [m["transactionId"] for m in consume(broker)] == ["before", *(f"m{k}" for k in range(5)), "after"]
    assert not list((broker.directory / "buffers" / "failed").iterdir())


def test_a_server_that_becomes_read_only_is_left_for_the_other(
    brokers: Brokers, embedded: EmbeddedServer, standby: EmbeddedServer
) -> None:
    broker = brokers(postgres=both(embedded, standby))
    broker.push([item("before")])
    wait_until(lambda: caught_up(embedded), 30, "the standby has everything")
    with psycopg.connect(embedded.dsn(), autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        connection.execute("SELECT pg_reload_conf()")
    wait_until(lambda: broker.push([item("m")])[0]["status"] == "buffered", 30, "a push is refused by the database")
    promote(standby)
    wait_drained(broker)
    assert consume(broker)[0]["transactionId"] == "before"
    with psycopg.connect(standby.dsn()) as connection:
        row = connection.execute("SELECT sum(last_offset + 1) FROM queen.log_partitions").fetchone()
    assert row is not None and row[0] >= 2, "what was pushed is at the new primary"


def test_what_an_old_server_had_is_forgotten(
    brokers: Brokers, embedded: EmbeddedServer, standby: EmbeddedServer
) -> None:
    """The standby lacks the last messages: their offsets are given out again, to others."""
    broker = brokers(postgres=both(embedded, standby))
    broker.pop("q", "p", subscriptionMode="all")  # from now on what is pushed is kept at hand for pops
    broker.push([item("kept")])
    wait_until(lambda: caught_up(embedded), 30, "the standby has everything")
    with psycopg.connect(standby.dsn(), autocommit=True) as connection:
        connection.execute("SELECT pg_wal_replay_pause()")
        wait_until(
            lambda: connection.execute("SELECT pg_get_wal_replay_pause_state() = 'paused'").fetchone() == (True,),
            30,
            "the standby is paused",
        )
    standby.stop("immediate")
    for key in ("lost1", "lost2"):
        broker.push([item(key)])
    embedded.stop("immediate")
    standby.start()
    promote(standby)
    wait_until(lambda: queued(broker, "new1"), 30, "a push is stored")
    broker.push([item("lost1"), item("new2")])
    wait_drained(broker)
    keys = [m["transactionId"] for m in consume(broker)]
    assert keys[0] == "kept"
    assert sorted(keys[1:]) == ["lost1", "new1", "new2"]
