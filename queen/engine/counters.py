"""What a worker counts of the work it does: in all since it started, and by queue since they were last taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from queen.engine.ack import COMPLETED, AckItem, ItemResult
from queen.engine.hotlist import Key
from queen.engine.identifiers import uuid_text
from queen.engine.pop import Popped
from queen.engine.push import QUEUED, Outcome

_MOST_PARTITIONS = 100_000


@dataclass(slots=True)
class Tally:
    """Requests and messages. Lags are milliseconds from a message's push to its delivery."""

    push_requests: int = 0
    push_messages: int = 0
    pop_requests: int = 0
    pop_messages: int = 0
    pop_empty: int = 0
    ack_requests: int = 0
    ack_messages: int = 0
    ack_success: int = 0
    ack_failed: int = 0
    transactions: int = 0
    dead_letters: int = 0
    lag_count: int = 0
    lag_ms: int = 0
    max_lag_ms: int = 0

    def add(self, other: Tally) -> None:
        for f in fields(Tally):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))

    def copy(self) -> Tally:
        return replace(self)

    def since(self, before: Tally) -> Tally:
        """What was counted after ``before``. The longest lag is that of this tally."""
        counts = {f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(Tally)}
        return Tally(**{**counts, "max_lag_ms": self.max_lag_ms})

    def delivered(self, count: int, lag: int, acked: bool) -> None:
        """Messages were handed out, ``lag`` milliseconds after they were pushed."""
        self.pop_messages += count
        self.lag_count += count
        self.lag_ms += lag * count
        self.max_lag_ms = max(self.max_lag_ms, lag)
        if acked:
            self.ack_messages += count
            self.ack_success += count

    def acked(self, count: int, failed: int, dead: int) -> None:
        self.ack_messages += count
        self.ack_success += count - failed
        self.ack_failed += failed
        self.dead_letters += dead


class Counters:
    """The tallies of one worker. They cost a request a few microseconds, whatever it carries."""

    def __init__(self) -> None:
        self.total = Tally()
        self.queues: dict[Key, Tally] = {}
        self._queue_of: dict[str, Key] = {}  # by partition id: an ack doesn't name the queue

    def take(self) -> dict[Key, Tally]:
        """What happened by queue since the last call."""
        queues, self.queues = self.queues, {}
        return queues

    def give_back(self, queues: dict[Key, Tally]) -> None:
        """What was taken could not be stored: it counts for the next time."""
        for key, tally in queues.items():
            self.of(key).add(tally)

    def pushed(self, tenant: bytes, outcomes: Sequence[Outcome]) -> None:
        """A push was answered."""
        self.total.push_requests += 1
        queues: dict[str, int] = {}
        for outcome in outcomes:
            queues[outcome.queue] = queues.get(outcome.queue, 0) + (outcome.status == QUEUED)
        for queue, stored in queues.items():
            tally = self.of((tenant, queue.encode()))
            tally.push_requests += 1
            tally.push_messages += stored
            self.total.push_messages += stored

    def popped(self, tenant: bytes, queue: str, popped: Popped | None, now: int) -> None:
        """A pop was answered, of one queue or (empty) of several. ``now`` is in PostgreSQL's microseconds."""
        tallies = [self.total]
        key = (tenant, queue.encode())
        if queue:
            tallies.append(self.of(key))
        for tally in tallies:
            tally.pop_requests += 1
            tally.pop_empty += popped is None
        for delivery in popped.deliveries if popped is not None else ():
            claim = delivery.claim
            for tally in tallies:
                lag = max(now - claim.created_at, 0) // 1000
                tally.delivered(len(delivery.frames), lag, acked=popped is not None and not popped.lease_id)
            if queue:
                if len(self._queue_of) >= _MOST_PARTITIONS:
                    self._queue_of.clear()
                self._queue_of[uuid_text(claim.partition_id)] = key

    def acked(self, items: Sequence[AckItem], results: Sequence[ItemResult]) -> None:
        """An ack was answered. Its messages count for the queues from which they were popped here."""
        self.total.ack_requests += 1
        partitions: dict[str, list[int]] = {}  # messages, failed, dead-lettered
        for item, result in zip(items, results, strict=True):
            counts = partitions.setdefault(item.partition_id, [0, 0, 0])
            counts[0] += 1
            if not (result.success and (item.status is None or item.status in COMPLETED)):
                counts[1] += 1
                counts[2] += result.dlq
        seen: set[Key] = set()
        for partition, counts in partitions.items():
            self.total.acked(*counts)
            key = self._queue_of.get(partition)
            if key is not None:
                tally = self.of(key)
                tally.acked(*counts)
                tally.ack_requests += key not in seen
                seen.add(key)

    def transacted(self, tenant: bytes, queues: set[str]) -> None:
        """A transaction was committed, which pushed to some queues."""
        self.total.transactions += 1
        for queue in queues:
            self.of((tenant, queue.encode())).transactions += 1

    def of(self, key: Key) -> Tally:
        """The tally of a queue."""
        tally = self.queues.get(key)
        if tally is None:
            tally = self.queues[key] = Tally()
        return tally
