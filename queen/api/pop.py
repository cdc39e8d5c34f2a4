"""The three pop routes, and the answer they share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import msgspec
from flask import Blueprint

from queen.api.answers import NO_CONTENT, Answer, Refusal, json_answer
from queen.api.bodies import check_group
from queen.api.http import Request, direct, no_head, parse_query, strict_boolean, strict_integer
from queen.db.binary import now, timestamp_text
from queen.db.records import Subscription
from queen.engine.encryption import Encryption
from queen.engine.frames import decode
from queen.engine.identifiers import QUEUE_MODE, uuid_text
from queen.engine.pop import Delivery, PopFailed, Popped, PopRequest
from queen.engine.waiting import Client

blueprint = Blueprint("pop", __name__)

_encode = msgspec.json.encode
_PLAIN = re.compile(rb'[^"\\\x00-\x1f]*').fullmatch
_DEFAULT_BATCH = 200
_UINT64 = 64


@dataclass(frozen=True, slots=True)
class PopParameters:
    """The query of a pop, checked; timeout in milliseconds, None where the broker's default applies."""

    batch: int
    partitions: int
    auto_ack: bool
    wait: bool
    timeout: int | None
    lease: int
    group: str
    mode: str | None
    start: str
    namespace: str
    task: str


@lru_cache(maxsize=4096)
def parameters(query: str) -> PopParameters:
    """Reads a query string; raises a 400 `Refusal`. Cached, since a consumer repeats its own."""
    p = dict(parse_query(query))
    timeout = strict_integer(p, "timeout", -1, _UINT64, low=0)
    strict_boolean(p, "conflation", False)
    strict_boolean(p, "autopilot", False)
    group = p.get("consumerGroup", QUEUE_MODE)
    check_group(group)
    mode = p.get("subscriptionMode")
    start = p.get("subscriptionFrom", "")
    if "\x00" in start:
        raise Refusal(400, "control characters are not allowed in subscriptionFrom")
    return PopParameters(
        batch=max(strict_integer(p, "batch", _DEFAULT_BATCH), 1),
        partitions=strict_integer(p, "partitions", 1),
        auto_ack=strict_boolean(p, "autoAck", False),
        wait=strict_boolean(p, "wait", False),
        timeout=None if timeout < 0 else timeout,
        lease=strict_integer(p, "leaseSeconds", 0),
        group=group,
        mode=None if mode is None else ("new" if mode in ("new", "new-only") else "all"),
        start=start,
        namespace=p.get("namespace", ""),
        task=p.get("task", ""),
    )


def pop_request(request: Request, p: PopParameters) -> PopRequest:
    settings = request.engine.settings
    mode = p.mode or settings.subscription_mode
    timeout = settings.pop_timeout_ms if p.timeout is None else p.timeout
    return PopRequest(
        request.tenant,
        Subscription(p.group.encode(), mode.encode(), p.start.encode()),
        p.batch,
        max(p.partitions, 0),
        max(p.lease, 0),
        p.auto_ack,
        p.wait,
        timeout / 1000,
        Client(request.environ.get("gunicorn.socket")),
    )


@blueprint.get("/api/v1/pop/queue/<queue>")
@direct
@no_head
def pop_queue(request: Request, queue: str) -> Answer:
    _check_name(queue, "queue")
    p = parameters(request.query)
    asked = pop_request(request, p)
    try:
        popped = request.engine.popper.wildcard(asked, queue.encode())
    except PopFailed as error:
        return json_answer({"error": str(error)}, 500)
    request.engine.counters.popped(request.tenant, queue, popped, now())
    return answer(popped, queue, p.group, request.engine.encryption)


@blueprint.get("/api/v1/pop/queue/<queue>/partition/<partition>")
@direct
@no_head
def pop_partition(request: Request, queue: str, partition: str) -> Answer:
    _check_name(queue, "queue")
    _check_name(partition, "partition")
    p = parameters(request.query)
    asked = pop_request(request, p)
    try:
        popped = request.engine.popper.pinned(asked, queue.encode(), partition.encode())
    except PopFailed as error:
        return json_answer({"error": str(error)}, 500)
    request.engine.counters.popped(request.tenant, queue, popped, now())
    return answer(popped, queue, p.group, request.engine.encryption)


@blueprint.get("/api/v1/pop")
@direct
@no_head
def pop_discovery(request: Request) -> Answer:
    p = parameters(request.query)
    if not p.namespace and not p.task:
        return json_answer({"success": False, "error": "namespace or task is required", "messages": []}, 400)
    _check_name(p.namespace, "namespace")
    _check_name(p.task, "task")
    asked = pop_request(request, p)
    try:
        popped = request.engine.popper.discovery(asked, p.namespace.encode(), p.task.encode())
    except PopFailed as error:
        return json_answer({"error": str(error)}, 500)
    request.engine.counters.popped(request.tenant, "", popped, now())
    return answer(popped, "", p.group, request.engine.encryption)


def _check_name(name: str, what: str) -> None:
    """A name no row can hold would fail in the database: it is refused before."""
    if any(c < " " for c in name):
        raise Refusal(400, f"control characters are not allowed in {what}: {name[:80]!r}")
    if len(name) > 255:
        raise Refusal(400, f"{what} exceeds 255 characters")


def answer(popped: Popped | None, queue: str, group: str, encryption: Encryption) -> Answer:
    """The messages of a pop in the order of their claims, joined from bytes; 204 for none."""
    if popped is None:
        return NO_CONTENT
    group_json = _encode(group)
    messages: list[bytes] = []
    partitions: dict[bytes, bytes] = {}
    for delivery in popped.deliveries:
        partitions.setdefault(delivery.claim.partition_id, delivery.claim.partition)
        _render(messages, delivery, popped.lease_id, group_json, encryption)
    first_id, first_name = next(iter(partitions.items()))
    body = b"".join(
        (
            b'{"success":true,"queue":',
            _encode(queue),
            b',"partition":',
            _encode(first_name.decode()),
            b',"partitionId":"',
            uuid_text(first_id).encode(),
            b'","leaseId":"',
            popped.lease_id,
            b'","consumerGroup":',
            group_json,
            b',"messages":[',
            b",".join(messages),
            b'],"partitionsClaimed":%d}' % len(partitions),
        )
    )
    return Answer(200, body)


def _render(messages: list[bytes], delivery: Delivery, lease_id: bytes, group: bytes, encryption: Encryption) -> None:
    """The messages of one claimed segment: everything but id, keys and payload is the same for all."""
    claim = delivery.claim
    tail = b"".join(
        (
            b',"createdAt":"',
            timestamp_text(claim.created_at).encode(),
            b'","partitionId":"',
            uuid_text(claim.partition_id).encode(),
            b'","partition":',
            _encode(claim.partition.decode()),
            b',"leaseId":"',
            lease_id,
            b'","consumerGroup":',
            group,
            b"}",
        )
    )
    opens = encryption.opens
    for message_id, key, payload, trace_id, subject, _ in map(decode, delivery.frames):
        if opens:
            payload = encryption.open(payload)
        messages.append(
            b'{"id":"%b","transactionId":%b,"traceId":%b,"data":%b,"producerSub":%b%b'
            % (
                uuid_text(message_id).encode(),
                b'"%b"' % key if _PLAIN(key) else _encode(key.decode()),
                b"null" if trace_id is None else b'"%b"' % uuid_text(trace_id).encode(),
                payload or b"null",
                b"null" if subject is None else _encode(subject.decode()),
                tail,
            )
        )
