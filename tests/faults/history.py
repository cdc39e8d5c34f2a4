"""What clients of a run saw, and whether a queue may have behaved like that.

Clients record every push answer, delivery and ack with the times between which it happened. Offsets are
never on the wire: they are looked up in the log afterwards, by message id. A time in the middle of an
operation is unknown, so the checker only reports what no order of events could explain.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.faults.log_check import Stored

Lane = tuple[str, str]  # queue and partition


@dataclass(slots=True)
class Push:
    """One item of a push that was answered."""

    producer: str
    number: int  # grows with each item this producer pushes to this partition
    lane: Lane
    transaction_id: str
    status: str
    message_id: str
    broker: int = 0  # that answered


@dataclass(slots=True)
class Ack:
    """An ack of a delivery, answered or not: what it completed, and whether it may have ended the lease."""

    sent: float
    completed: list[str]  # message ids
    releases: bool
    answered: float = math.inf  # when its success was known


@dataclass(slots=True)
class Delivery:
    """The part of a pop's answer that belongs to one partition."""

    asked: float
    answered: float
    group: str
    lane: Lane
    lease: str
    seconds: float  # of the lease
    message_ids: list[str]
    transaction_ids: list[str]
    acks: list[Ack] = field(default_factory=list)

    @property
    def held_until(self) -> float:
        """Until when the lease was certainly live, unless somebody else ended it."""
        released = min((ack.sent for ack in self.acks if ack.releases), default=math.inf)
        return min(released, self.asked + self.seconds)


class History:
    """Everything that the clients of one run recorded."""

    def __init__(self) -> None:
        self.pushes: list[Push] = []
        self.deliveries: list[Delivery] = []

    def accepted(self) -> dict[str, Lane]:
        """Return the message ids that were answered with `queued`."""
        return {push.message_id: push.lane for push in self.pushes if push.status == "queued"}

    def violations(self, messages: Sequence[Stored], groups: Mapping[str, str]) -> list[str]:
        """Return what can't have happened, each line beginning with the number of the rule.

        Takes the messages of the log, and the groups that must have been given every message, with the
        queue of each.
        """
        places = {message.message_id: message for message in messages}
        return [
            *_lost(self.pushes, messages),
            *_unordered(self.pushes, messages),
            *_undelivered(self, messages, groups),
            *_misdelivered(self.deliveries, places),
        ]


def _lost(pushes: Iterable[Push], messages: Sequence[Stored]) -> Iterator[str]:
    """Judge each answer by what lies in the log: nothing lost, nothing twice, duplicates named rightly."""
    stored: dict[tuple[Lane, str], list[Stored]] = defaultdict(list)
    for message in messages:
        stored[(message.queue, message.partition), message.transaction_id].append(message)
    for (lane, key), twins in stored.items():
        if len(twins) > 1:
            yield f"P2: {key} of {lane} lies at the offsets {[twin.offset for twin in twins]}"
    for push in pushes:
        twins = stored.get((push.lane, push.transaction_id), [])
        if push.status == "buffered":
            # It may be stored under the id of an earlier attempt that was never answered.
            if not twins:
                yield f"P1: {push.transaction_id} of {push.lane} was buffered, not stored"
            continue
        if push.status not in ("queued", "duplicate"):
            continue
        if push.message_id not in [twin.message_id for twin in twins]:
            rule = "P1" if push.status == "queued" else "P3"
            yield f"{rule}: {push.transaction_id} of {push.lane} was {push.status} as {push.message_id}, not stored"


def _unordered(pushes: Iterable[Push], messages: Sequence[Stored]) -> Iterator[str]:
    """A producer that waits for each answer finds its messages in the order in which it pushed them.

    What was buffered is stored later: it stays in order with what the same broker took, while another may
    store a later one first.
    """
    keys = {((message.queue, message.partition), message.transaction_id): message.offset for message in messages}
    ids = {message.message_id: message.offset for message in messages}
    last: dict[tuple[str, Lane, int], tuple[int, int]] = {}
    for push in pushes:
        buffered = push.status == "buffered"
        offset = keys.get((push.lane, push.transaction_id)) if buffered else ids.get(push.message_id)
        if offset is None:
            continue
        for where in (0, push.broker):  # 0: what was stored when it was answered, wherever
            number, before = last.get((push.producer, push.lane, where), (-1, -1))
            if push.number > number and offset <= before:
                yield f"P5: {push.producer} pushed {push.transaction_id} later, but it lies at {offset} <= {before}"
            if push.number > number and (where or not buffered):
                last[push.producer, push.lane, where] = (push.number, offset)


def _undelivered(history: History, messages: Sequence[Stored], groups: Mapping[str, str]) -> Iterator[str]:
    given: dict[str, set[str]] = defaultdict(set)
    for delivery in history.deliveries:
        given[delivery.group].update(delivery.message_ids)
    for group, queue in groups.items():
        for message in messages:
            if message.queue == queue and message.message_id not in given[group]:
                yield f"P1: {group} was never given {message.transaction_id} at {message.offset} of {message.partition}"


def _misdelivered(deliveries: Iterable[Delivery], places: Mapping[str, Stored]) -> Iterator[str]:
    """Judge each partition and group by itself."""
    lanes: dict[tuple[str, Lane], list[Delivery]] = defaultdict(list)
    for delivery in deliveries:
        unknown = [m for m in delivery.message_ids if m not in places]
        if unknown:
            yield f"P1: {delivery.group} was given {unknown}, which the log doesn't hold"
            continue
        for message_id, key in zip(delivery.message_ids, delivery.transaction_ids, strict=True):
            if places[message_id].transaction_id != key:
                yield f"P1: {message_id} was delivered as {key} and stored as {places[message_id].transaction_id}"
        lanes[delivery.group, delivery.lane].append(delivery)
    for (group, lane), batches in lanes.items():
        for text in _misordered(batches, places):
            yield f"{text} ({group} on {lane})"


def _misordered(batches: list[Delivery], places: Mapping[str, Stored]) -> Iterator[str]:
    batches.sort(key=lambda batch: batch.answered)
    acks = [ack for batch in batches for ack in batch.acks if ack.completed]
    tops = {id(ack): max(places[m].offset for m in ack.completed) for ack in acks}
    for k, batch in enumerate(batches):
        at = [places[message_id].offset for message_id in batch.message_ids]
        if at != list(range(at[0], at[0] + len(at))):
            yield f"C3: a batch held the offsets {at}"
        sent = max((tops[id(ack)] for ack in acks if ack.sent < batch.answered), default=-1)
        known = max((tops[id(ack)] for ack in acks if ack.answered < batch.asked), default=-1)
        if at[0] > sent + 1:
            yield f"C2: a batch began at {at[0]} when nothing above {sent} had been acked"
        if at[0] <= known:
            yield f"C2: a batch began at {at[0]} when {known} had been acked for certain"
        for other in reversed(batches[:k]):
            if other.answered + other.seconds < batch.answered:
                break
            # Both were claimed before either lease can have ended.
            if batch.answered < min(other.held_until, batch.held_until):
                first = places[other.message_ids[0]].offset
                yield f"C1: {at[0]}.. was leased as {batch.lease} while {other.lease} held {first}.."
