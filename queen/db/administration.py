"""Administration of queues, consumer groups and dead letters: one function for each stored operation.

Tenants are 16 bytes. What a listing returns is JSON text that PostgreSQL made, for the answer as it is.
All of them raise `queen.db.errors.Unavailable` without a connection and `psycopg.Error` when the
statement fails; its subclass `psycopg.DataError` means that a value of the caller can't be used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any
from uuid import UUID

from queen import codec
from queen.db.database import Database


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """Which dead letters are meant; None asks nothing. Times are text that PostgreSQL reads."""

    queue: str | None = None
    group: str | None = None
    partition: str | None = None
    failed_from: str | None = None
    failed_to: str | None = None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One dead letter: its fields as a JSON object, and apart from them the payload as it was sent."""

    fields: str
    payload: str | None
    encrypted: bool


def ping(database: Database) -> None:
    """Makes one round trip to PostgreSQL."""
    with database.connection() as connection:
        connection.execute("SELECT 1")


def configure_queue(
    database: Database, tenant: bytes, queue: str, options: Mapping[str, Any], merge: bool, encrypts: bool
) -> str:
    """Creates or reconfigures a queue and returns the answer to the client.

    An option that is absent gets its default, or keeps its value in a merge. ``encrypts`` says
    whether this broker can encrypt. Raises `psycopg.DataError` for an option that has the wrong type, for a
    name that is too long, and for encryption that can't be done.
    """
    call = "configure_queue_v1(p_tenant => %s, p_queue => %s, p_options => %s, p_merge => %s, p_encrypts => %s)::text"
    return str(_call(database, call, tenant, queue, codec.dumps(options).decode(), merge, encrypts))


def delete_queue(database: Database, tenant: bytes, queue: str) -> bool:
    """Deletes a queue with everything in it; returns whether it existed."""
    return bool(_call(database, "delete_queue_v1(p_tenant => %s, p_queue => %s)", tenant, queue))


def list_queues(
    database: Database,
    tenant: bytes,
    namespace: str | None,
    task: str | None,
    search: str | None,
    limit: int,
    offset: int,
) -> str:
    """The queues of a tenant, newest first. None asks nothing; ``search`` is a part of the name.

    Raises `psycopg.DataError` for a negative limit or offset.
    """
    call = "get_queues_v1(%s, %s, %s, %s, %s, %s)::text"
    return str(_call(database, call, tenant, namespace, task, search, limit, offset))


def queue_detail(database: Database, tenant: bytes, queue: str) -> str | None:
    """A queue with its partitions, or None when there is no such queue."""
    return _text(_call(database, "get_queue_v2(%s, %s)::text", tenant, queue))


def queue_depth(database: Database, tenant: bytes, queue: str, group: str | None) -> str | None:
    """What a queue owes, to one group or to all; None when there is no such queue."""
    return _text(_call(database, "log_queue_depth_v1(%s, %s, %s)::text", tenant, queue, group))


def list_groups(database: Database, tenant: bytes) -> str:
    """Every consumer group on every queue where it has a cursor."""
    return str(_call(database, "get_consumer_groups_v4(%s)::text", tenant))


def lagging_partitions(database: Database, tenant: bytes, seconds: int) -> str:
    """The partitions in which a group's oldest unconsumed message is older than ``seconds``."""
    return str(_call(database, "get_lagging_partitions_v1(%s, %s)::text", tenant, seconds))


def group_detail(database: Database, tenant: bytes, group: str) -> str:
    """The cursors of a group by queue; an empty object for a group that nobody knows."""
    return str(_call(database, "get_consumer_group_v1(%s, %s)::text", tenant, group))


def delete_group(database: Database, tenant: bytes, group: str, metadata: bool) -> int:
    """Deletes a group's cursors, with ``metadata`` its registrations too; returns the number of cursors."""
    return int(_call(database, "delete_consumer_group_v1(%s, %s, %s)", tenant, group, metadata))


def delete_group_of_queue(database: Database, tenant: bytes, queue: str, group: str, metadata: bool) -> int:
    """The same in one queue."""
    call = "delete_consumer_group_for_queue_v1(%s, %s, %s, %s)"
    return int(_call(database, call, tenant, queue, group, metadata))


def move_subscription(database: Database, tenant: bytes, group: str, timestamp: str) -> int:
    """Changes where a group starts on partitions new to it; returns how many registrations changed.

    Raises `psycopg.DataError` when PostgreSQL can't read the time.
    """
    call = "update_consumer_group_subscription_v1(%s, %s, %s)"
    return int(_call(database, call, tenant, group, timestamp))


def seek_group(database: Database, tenant: bytes, queue: str, group: str, timestamp: str | None) -> int:
    """Moves a group's cursors in a queue to a time, or to the end for None; returns how many.

    One transaction, unless the group is new to more than 500 partitions: cursors are then created in
    lots first. Raises `psycopg.DataError` when PostgreSQL can't read the time.
    """
    call = "log_seek_consumer_group_v1(%s, %s, %s, %s, %s)"
    return _seek(database, call, tenant, queue, group, timestamp is None, timestamp)


def seek_partition(
    database: Database, tenant: bytes, queue: str, partition: str, group: str, timestamp: str | None
) -> int:
    """The same in one partition; returns 0 when there is no such partition, else 1."""
    call = "log_seek_partition_v1(%s, %s, %s, %s, %s, %s)"
    return _seek(database, call, tenant, queue, partition, group, timestamp is None, timestamp)


def list_dead_letters(
    database: Database, tenant: bytes, chosen: DeadLetterFilter, limit: int, offset: int
) -> list[DeadLetter]:
    """A page of dead letters, the last filed first.

    Raises `psycopg.DataError` for a time that PostgreSQL can't read and a negative limit or offset.
    """
    with database.connection() as connection:
        rows = connection.execute(
            "SELECT fields::text, payload, encrypted FROM queen.get_dlq_messages_v1(%s, %s, %s, %s, %s, %s, %s, %s)",
            (UUID(bytes=tenant), *astuple(chosen), limit, offset),
        ).fetchall()
    return [DeadLetter(*row) for row in rows]


def purge_dead_letters(database: Database, tenant: bytes, chosen: DeadLetterFilter) -> int:
    """Deletes the dead letters that are meant; returns how many.

    Raises `psycopg.DataError` for a time that PostgreSQL can't read.
    """
    call = "delete_dlq_messages_v1(%s, %s, %s, %s, %s, %s)"
    return int(_call(database, call, tenant, *astuple(chosen)))


def delete_dead_letter(database: Database, tenant: bytes, partition: UUID, transaction_id: str) -> int:
    """Deletes every group's dead letter of one message; returns how many there were."""
    call = "delete_dead_letter_v1(%s, %s, %s)"
    return int(_call(database, call, tenant, partition, transaction_id))


def _seek(database: Database, call: str, *parameters: Any) -> int:
    while (moved := _call(database, call, *parameters)) is None:
        pass  # a lot of cursors was created, more are missing
    return int(moved)


def _call(database: Database, call: str, tenant: bytes, *parameters: Any) -> Any:
    """The value of a stored function whose first parameter in ``call`` is the tenant."""
    query = f"SELECT queen.{call}".encode()
    with database.connection() as connection:
        row = connection.execute(query, (UUID(bytes=tenant), *parameters)).fetchone()
    return row[0] if row else None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
