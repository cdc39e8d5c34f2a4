"""What a request carries and what its answer says was done, counted on the bytes that pass."""

from __future__ import annotations

import gzip
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from queen import codec

# What a body that isn't what its route takes raises; the broker's own 400 answers it.
_UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeError, OSError, EOFError)
_SHRINKING = frozenset({"get", "getPrefix", "delete", "cancel"})
_BILLED = ("queued", "buffered")


class Unreadable(Exception):
    """A body that is not what its route takes."""


class _Item(Struct):
    queue: str
    payload: Raw
    partition: str | None = None


class _Push(Struct):
    items: list[_Item]


class _Operation(Struct):
    type: str = ""
    queue: str | UnsetType = UNSET
    payload: Raw | UnsetType = UNSET
    partition: str | None = None
    items: list[_Item] | UnsetType = UNSET


class _Transaction(Struct):
    operations: list[_Operation]


class _Ephemeral(Struct):
    messages: list[Raw]


class _Status(Struct):
    status: str = ""


class _Batch(Struct):
    messages: list[Raw]


class _Result(Struct):
    type: str = ""
    duplicate: bool = False


class _Outcome(Struct):
    success: bool = False
    results: list[_Result] = []


class _Pushed(Struct):
    pushed: int = 0


_push = msgspec.json.Decoder(_Push)
_transaction = msgspec.json.Decoder(_Transaction)
_ephemeral = msgspec.json.Decoder(_Ephemeral)
_statuses = msgspec.json.Decoder(list[_Status])
_batch = msgspec.json.Decoder(_Batch)
_outcome = msgspec.json.Decoder(_Outcome)
_pushed = msgspec.json.Decoder(_Pushed)


@dataclass(slots=True)
class Load:
    """The messages of a body: how many, where to, and the first that is too large, if one is."""

    count: int = 0
    places: set[tuple[str, str]] = field(default_factory=set)
    oversized: tuple[int, int] | None = None


def of_push(body: bytes, max_payload: int | None) -> Load:
    """Counts a push; raises `Unreadable`."""
    try:
        return _load(_push.decode(body).items, body, max_payload)
    except msgspec.MsgspecError:
        return _of_odd_push(body, max_payload)
    except _UNREADABLE as error:
        raise Unreadable(str(error)) from error


def _of_odd_push(body: bytes, max_payload: int | None) -> Load:
    """A push with lone surrogates, which msgspec refuses and the broker takes."""
    try:
        value = codec.loads(body)
        load = Load()
        for index, item in enumerate(value["items"]):
            if not isinstance(item["queue"], str):
                raise Unreadable("queue is no text")
            # Re-encoded as short as it can be, so that nothing is refused that is within the cap.
            size = len(codec.dumps(item["payload"])) if max_payload is not None and len(body) > max_payload else 0
            if load.oversized is None and max_payload is not None and size > max_payload:
                load.oversized = (index, size)
            load.count += 1
            load.places.add((item["queue"], item.get("partition") or "Default"))
        return load
    except (codec.JsonError, KeyError, TypeError, AttributeError) as error:
        raise Unreadable(str(error)) from error


def of_transaction(body: bytes, max_payload: int | None) -> Load:
    """Counts the pushes of a transaction; raises `Unreadable`."""
    try:
        items: list[_Item] = []
        for operation in _transaction.decode(body).operations:
            if operation.type == "ack":
                continue
            if operation.items is not UNSET:
                items += operation.items
            elif operation.queue is not UNSET and operation.payload is not UNSET:
                items.append(_Item(operation.queue, operation.payload, operation.partition))
        return _load(items, body, max_payload)
    except _UNREADABLE as error:
        raise Unreadable(str(error)) from error


def of_ephemeral(body: bytes) -> Load:
    """Counts the messages of an ephemeral push; raises `Unreadable`."""
    try:
        return Load(len(_ephemeral.decode(body).messages))
    except _UNREADABLE as error:
        raise Unreadable(str(error)) from error


def grows(body: bytes, streams: bool) -> bool:
    """Whether a mixed body asks for more storage; one that can't be read doesn't, the broker refuses it."""
    try:
        value: Any = codec.loads(body)
    except codec.JsonError:
        return False
    if streams:
        return isinstance(value, dict) and bool(value.get("push_items"))
    operations = value.get("operations") if isinstance(value, dict) else value
    if not isinstance(operations, list):
        return False
    return any(not isinstance(one, dict) or one.get("op") not in _SHRINKING for one in operations)


def retention(body: bytes) -> tuple[str, list[tuple[str, int]]]:
    """The queue of a configure and the retentions it asks for, in seconds; raises `Unreadable`."""
    try:
        value = codec.loads(body)
    except codec.JsonError as error:
        raise Unreadable(str(error)) from error
    if not isinstance(value, dict) or not isinstance(value.get("queue"), str):
        raise Unreadable("no queue")
    options = value["options"] if isinstance(value.get("options"), dict) else value
    found = []
    for name in ("retentionSeconds", "completedRetentionSeconds"):
        wanted = options.get(name)
        if isinstance(wanted, bool) or not isinstance(wanted, int | float | str):
            continue
        try:
            found.append((name, int(float(wanted))))
        except (ValueError, OverflowError):
            continue
    return value["queue"], found


def pushed(body: bytes) -> tuple[int, int]:
    """The messages a push is billed for, and how many of them a broker keeps on its disk; raises `Unreadable`."""
    statuses = [item.status for item in _decode(_statuses, body)]
    buffered = statuses.count("buffered")
    return statuses.count("queued") + buffered, buffered


def delivered(body: bytes) -> int:
    """The messages of a pop's answer; raises `Unreadable`."""
    return len(_decode(_batch, body).messages)


def transacted(body: bytes, count: int) -> int:
    """The messages a transaction is billed for, of ``count`` that it carried; raises `Unreadable`."""
    outcome = _decode(_outcome, body)
    return max(0, count - sum(result.duplicate for result in outcome.results)) if outcome.success else 0


def ephemeral(body: bytes) -> int:
    """The messages an ephemeral push is billed for; raises `Unreadable`."""
    return int(_decode(_pushed, body).pushed)


def plain(body: bytes, encoding: bytes | None) -> bytes:
    """A body as it was before it was compressed; raises `Unreadable`."""
    if encoding is None or encoding.lower() == b"identity":
        return body
    if encoding.lower() != b"gzip":
        raise Unreadable(f"content encoding {encoding!r}")
    try:
        return gzip.decompress(body)
    except (OSError, EOFError) as error:
        raise Unreadable(str(error)) from error


def _load(items: list[_Item], body: bytes, max_payload: int | None) -> Load:
    load = Load(len(items))
    for item in items:
        load.places.add((item.queue, item.partition or "Default"))
    if max_payload is not None and len(body) > max_payload:
        for index, item in enumerate(items):
            size = memoryview(item.payload).nbytes
            if size > max_payload:
                load.oversized = (index, size)
                break
    return load


def _decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except _UNREADABLE as error:
        raise Unreadable(str(error)) from error
