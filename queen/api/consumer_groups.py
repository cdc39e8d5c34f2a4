"""Consumer groups: listings, removal, subscription and seek."""

from __future__ import annotations

from typing import Any

from flask import Blueprint

from queen import codec
from queen.api.answers import Answer, Refusal, json_answer
from queen.api.database_errors import database_errors
from queen.api.http import Request, direct, lenient_boolean, lenient_integer
from queen.db import administration
from queen.log import Log

blueprint = Blueprint("consumer_groups", __name__)

log = Log("hotlist")

_NAME_LIMIT = 255
_HOUR = 3600


@blueprint.get("/api/v1/consumer-groups")
@direct
@database_errors("consumer groups failed: ")
def list_groups(request: Request) -> Answer:
    """Every group on every queue where it has a cursor, as a bare array."""
    return Answer(200, administration.list_groups(request.engine.database, request.tenant).encode())


@blueprint.get("/api/v1/consumer-groups/lagging")
@direct
@database_errors("lagging failed: ")
def lagging(request: Request) -> Answer:
    """The partitions whose oldest unconsumed message has waited longer than ``minLagSeconds``."""
    seconds = lenient_integer(request.parameters(), "minLagSeconds", _HOUR)
    return Answer(200, administration.lagging_partitions(request.engine.database, request.tenant, seconds).encode())


@blueprint.get("/api/v1/consumer-groups/<group>")
@direct
@database_errors("details failed: ")
def detail(request: Request, group: str) -> Answer:
    """A group's cursors by queue; an unknown group has none."""
    return Answer(200, administration.group_detail(request.engine.database, request.tenant, group).encode())


@blueprint.delete("/api/v1/consumer-groups/<group>")
@direct
@database_errors("delete(seg) failed: ")
def delete(request: Request, group: str) -> Answer:
    """Makes a group start over on every queue."""
    metadata = lenient_boolean(request.parameters(), "deleteMetadata", True)
    count = administration.delete_group(request.engine.database, request.tenant, group, metadata)
    _announce(request, None, group, None)
    return json_answer(
        {"success": True, "consumerGroup": group, "deletedPartitions": count, "metadataDeleted": metadata}
    )


@blueprint.delete("/api/v1/consumer-groups/<group>/queues/<queue>")
@direct
@database_errors("delete(seg) failed: ")
def delete_of_queue(request: Request, group: str, queue: str) -> Answer:
    """Makes a group start over on one queue."""
    metadata = lenient_boolean(request.parameters(), "deleteMetadata", True)
    count = administration.delete_group_of_queue(request.engine.database, request.tenant, queue, group, metadata)
    _announce(request, queue, group, None)
    return json_answer(
        {
            "success": True,
            "consumerGroup": group,
            "queueName": queue,
            "deletedPartitions": count,
            "metadataDeleted": metadata,
        }
    )


@blueprint.post("/api/v1/consumer-groups/<group>/subscription")
@direct
@database_errors("subscription failed: ")
def subscription(request: Request, group: str) -> Answer:
    """Changes where a group starts on partitions new to it; cursors stay where they are."""
    body = request.json()
    timestamp = body.get("subscriptionTimestamp") if isinstance(body, dict) else None
    if not isinstance(timestamp, str) or not timestamp:
        raise Refusal(400, "subscriptionTimestamp is required")
    rows = administration.move_subscription(request.engine.database, request.tenant, group, timestamp)
    return json_answer({"success": True, "consumerGroup": group, "newTimestamp": timestamp, "rowsUpdated": rows})


@blueprint.post("/api/v1/consumer-groups/<group>/queues/<queue>/seek")
@direct
@database_errors("seek failed: ")
def seek(request: Request, group: str, queue: str) -> Answer:
    """Moves a group's cursors in every partition of a queue to the end or to a time."""
    _check_group(group)
    timestamp = _target(request, blank_is_end=False)
    count = administration.seek_group(request.engine.database, request.tenant, queue, group, timestamp)
    answer: dict[str, Any] = {"consumerGroup": group, "queueName": queue, "partitionsUpdated": count}
    if count == 0:
        return json_answer({"success": False, "error": "Queue not found or has no partitions", **answer}, 404)
    answer.update(success=True, seekToEnd=timestamp is None, targetTimestamp=timestamp)
    return json_answer({**answer, **_announce(request, queue, group, None)})


@blueprint.post("/api/v1/consumer-groups/<group>/queues/<queue>/partitions/<partition>/seek")
@direct
@database_errors("seek failed: ")
def seek_partition(request: Request, group: str, queue: str, partition: str) -> Answer:
    """Moves a group's cursor in one partition; without a target, to the end."""
    _check_group(group)
    timestamp = _target(request, blank_is_end=True)
    moved = administration.seek_partition(request.engine.database, request.tenant, queue, partition, group, timestamp)
    if not moved:
        return json_answer({"success": False, "error": "Partition not found"}, 404)
    answer: dict[str, Any] = {
        "success": True,
        "consumerGroup": group,
        "queueName": queue,
        "partitionName": partition,
        "seekToEnd": timestamp is None,
        "targetTimestamp": timestamp,
        "updated": True,
    }
    return json_answer({**answer, **_announce(request, queue, group, partition)})


def _check_group(group: str) -> None:
    """A longer name would get a cursor and then fail where the group's first empty pop is remembered."""
    if len(group) > _NAME_LIMIT:
        raise Refusal(400, f"consumer group is longer than {_NAME_LIMIT} characters")


def _target(request: Request, blank_is_end: bool) -> str | None:
    """Where to seek to: a time, or None for the end. Raises a 400 `Refusal` when the body says neither.

    Clients that post "no data" send nothing, ``null`` or ``{}``; ``blank_is_end`` takes these as the end.
    """
    data = request.body()
    if blank_is_end and not data.strip():
        return None
    try:
        body = codec.loads(data)
    except codec.JsonError:
        raise Refusal(400, "bad body") from None
    if blank_is_end and body in (None, {}):
        return None
    if isinstance(body, dict):
        if body.get("toEnd") is True:
            return None
        timestamp = body.get("timestamp")
        if isinstance(timestamp, str) and timestamp:
            return timestamp
    raise Refusal(400, "Must specify toEnd=true or a timestamp")


def _announce(request: Request, queue: str | None, group: str, partition: str | None) -> dict[str, Any]:
    """Tells this broker and its peers that cursors moved. Returns what to add to the answer.

    The move is committed, and a durable marker makes every broker look later, so a failure here is a
    warning.
    """
    try:
        request.engine.group_moved(request.tenant, queue, group, partition)
    except Exception:
        log.exception("repair after a cursor move failed", queue=queue, group=group)
        return {
            "hotlistRepaired": False,
            "warning": "cursors moved, but waiting consumers may notice only at the next reconcile",
        }
    return {}
