"""The users of a run: producers, consumers, and those that wait. Generators for `bench.loop`.

What a client does between two requests is paid for every message, so answers are checked by counting
bytes, and parsed only where a value out of them is needed or the count is not the expected one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from bench.loop import ACK, OTHER, POP, PUSH, Client, Loop
from bench.measure import Counts
from bench.workload import Consumption, Messages

# Field names are those of the wire; everything else in an answer is skipped unread.


class _Message(msgspec.Struct, gc=False):
    transactionId: str


class _Popped(msgspec.Struct, gc=False):
    partitionId: str
    leaseId: str
    messages: list[_Message]


class _Acked(msgspec.Struct, gc=False):
    success: bool


class _Pushed(msgspec.Struct, gc=False):
    status: str


_decode_pop = msgspec.json.Decoder(_Popped).decode
_decode_acks = msgspec.json.Decoder(list[_Acked]).decode
_decode_pushes = msgspec.json.Decoder(list[_Pushed]).decode


@dataclass
class Control:
    """Shared by the clients of one run: what they counted, and whether they should go on."""

    counts: Counts = field(default_factory=Counts)
    producing: bool = True
    consuming: bool = True
    keep_ids: bool = True
    accepted: list[tuple[int, int]] = field(default_factory=list)
    delivered: dict[str, list[str]] = field(default_factory=dict)


def pushed(control: Control, status: int, body: bytes, batch: int) -> bool:
    """Check the answer of a push of `batch` messages; False when not all of them are queued."""
    if status == 201:
        if body.count(b'"queued"') == batch:
            control.counts.pushed += batch
            return True
        try:
            statuses = [item.status for item in _decode_pushes(body)]
        except msgspec.DecodeError:
            statuses = []
        for name in statuses:
            control.counts.statuses[name] = control.counts.statuses.get(name, 0) + 1
        if len(statuses) == batch and set(statuses) == {"queued"}:
            control.counts.pushed += batch
            return True
    control.counts.error("push", status, body)
    return False


def acked(control: Control, status: int, body: bytes, batch: int) -> bool:
    """Check the answer of an ack of `batch` messages; False when not all of them succeeded."""
    if status == 200:
        good = body.count(b'"success":true')
        if good != batch:
            try:
                good = sum(item.success for item in _decode_acks(body))
            except msgspec.DecodeError:
                good = -1
        if good == batch:
            control.counts.consumed += batch
            return True
    control.counts.error("ack", status, body)
    return False


def producer(control: Control, messages: Messages, batch: int, start: int) -> Client:
    """Push without a pause, one partition after the other."""
    partition = start
    while control.producing:
        first, request = messages.push(partition, batch)
        status, body = yield PUSH, request
        if pushed(control, status, body, batch) and control.keep_ids:
            control.accepted.append((first, batch))
        partition = (partition + 1) % messages.partitions


def filler(control: Control, messages: Messages, batch: int, start: int, pushes: int) -> Client:
    """Push a fixed number of times: how a backlog is made."""
    for step in range(pushes):
        _, request = messages.push((start + step) % messages.partitions, batch)
        status, body = yield PUSH, request
        pushed(control, status, body, batch)


def _popped(control: Control, status: int, body: bytes) -> tuple[str, str, list[str]] | None:
    """Partition, lease and transactionIds of a pop that delivered something."""
    if status == 200:
        try:
            answer = _decode_pop(body)
        except msgspec.DecodeError:
            answer = None
        if answer is not None and answer.messages:
            return answer.partitionId, answer.leaseId, [item.transactionId for item in answer.messages]
    if status == 204:
        control.counts.empty_pops += 1
    else:
        control.counts.error("pop", status, body)
    return None


def consumer(control: Control, consumption: Consumption, single: bool) -> Client:
    """Pop, acknowledge, and again."""
    delivered = control.delivered.setdefault(consumption.group, [])
    while control.consuming:
        status, body = yield POP, consumption.pop
        popped = _popped(control, status, body)
        if popped is None:
            continue
        partition_id, lease_id, ids = popped
        if control.keep_ids:
            delivered += ids
        status, body = yield ACK, consumption.ack(partition_id, lease_id, ids, single)
        acked(control, status, body, len(ids))


@dataclass
class Post:
    """Messages on their way in the latency scenario: due, and sent but not yet received."""

    due: deque[int] = field(default_factory=deque)
    sent: dict[str, int] = field(default_factory=dict)
    received: list[tuple[int, int]] = field(default_factory=list)
    unknown: int = 0


def paced_producer(control: Control, messages: Messages, post: Post, batch: int, start: int) -> Client:
    """Push when a message is due; the clock of a message starts when it is due, not when it is sent."""
    partition = start
    while control.producing:
        if not post.due:
            yield None
            continue
        due = post.due.popleft()
        first, request = messages.push(partition, batch)
        ids = messages.ids(first, batch)
        post.sent.update(dict.fromkeys(ids, due))
        status, body = yield PUSH, request
        if not pushed(control, status, body, batch):
            for name in ids:
                post.sent.pop(name, None)
        partition = (partition + 1) % messages.partitions


def receiver(control: Control, consumption: Consumption, post: Post, loop: Loop, single: bool) -> Client:
    """A consumer that notes when each message came."""
    while control.consuming:
        status, body = yield POP, consumption.pop
        popped = _popped(control, status, body)
        if popped is None:
            continue
        now = loop.now
        partition_id, lease_id, ids = popped
        for name in ids:
            due = post.sent.pop(name, None)
            if due is None:
                post.unknown += 1
            else:
                post.received.append((due, now))
        status, body = yield ACK, consumption.ack(partition_id, lease_id, ids, single)
        acked(control, status, body, len(ids))


def waiter(control: Control, consumption: Consumption) -> Client:
    """A consumer of a queue on which nothing happens: pops again when its long poll runs out."""
    while control.consuming:
        status, body = yield POP, consumption.pop
        _popped(control, status, body)


def getter(control: Control, request: bytes) -> Client:
    """Ask for one page again and again."""
    while control.producing:
        status, body = yield OTHER, request
        if status != 200:
            control.counts.error("get", status, body)
