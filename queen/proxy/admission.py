"""Queues and partitions against the plan: a push creates them, so each new one is admitted first.

Known pairs pass from memory. What is new is noted in the database later and together, never in the push.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable

from psycopg.types.json import Jsonb

from queen.proxy.clusters import Cluster
from queen.proxy.limits import Limits
from queen.proxy.pxdb import Pxdb
from queen.proxy.refusals import quota_exceeded

_KNOWN = "SELECT name, partitions_count FROM queen_proxy.queues WHERE cluster_id = %s AND deleted_at IS NULL"


# Whether a broker has a partition: the count that outlived a restart doesn't tell which ones it counts.
Exists = Callable[[Cluster, str, str], bool]


class _Inventory:
    """The queues of one cluster: the partitions seen by this process, and the count the database has."""

    __slots__ = ("counts", "seen")

    def __init__(self, counts: dict[str, int]) -> None:
        self.counts = counts
        self.seen: dict[str, set[str]] = {}

    def partitions(self, queue: str) -> int:
        return max(len(self.seen.get(queue, ())), self.counts.get(queue, 0))


class Admission:
    """The queues of all clusters."""

    def __init__(self, pxdb: Pxdb | None, limits: Limits, exists: Exists) -> None:
        self._pxdb = pxdb
        self._exists = exists
        self._limits = limits
        self._clusters: dict[str, _Inventory] = {}
        self._stale: set[str] = set()
        self._new: dict[tuple[str, str], int] = {}

    def admit(self, cluster: Cluster, places: Iterable[tuple[str, str]], rid: str) -> None:
        """Admits each queue and partition; raises `Refusal` 403 for one beyond the plan."""
        inventory = self._clusters.get(cluster.id)
        if inventory is None or cluster.id in self._stale:
            inventory = self._load(cluster.id)
        for queue, partition in places:
            seen = inventory.seen.get(queue)
            if seen is None or partition not in seen:
                self._admit_new(cluster, inventory, queue, partition, rid)

    def forget(self, cluster_id: str) -> None:
        """Has the inventory read anew: something about the cluster changed. What was seen stays seen."""
        if cluster_id in self._clusters:
            self._stale.add(cluster_id)

    def confirm(self, cluster_id: str, counts: dict[str, int], earlier: set[str]) -> None:
        """Takes over what the broker lists; of the names known ``earlier``, those not listed are gone."""
        inventory = self._clusters.get(cluster_id)
        if inventory is None:
            return
        for name in earlier - counts.keys():
            inventory.counts.pop(name, None)
            inventory.seen.pop(name, None)
        inventory.counts.update(counts)

    def names(self, cluster_id: str) -> set[str]:
        """The queues known of a cluster."""
        inventory = self._clusters.get(cluster_id)
        return set() if inventory is None else inventory.counts.keys() | inventory.seen.keys()

    def persist(self) -> None:
        """Notes new queues in the database; raises `Unavailable`, and then tries again the next time."""
        if self._pxdb is None or not self._new:
            return
        new, self._new = self._new, {}
        rows = [{"cluster_id": cluster, "name": name, "partitions": count} for (cluster, name), count in new.items()]
        try:
            self._pxdb.execute("SELECT queen_proxy.note_queues(%s)", (Jsonb(rows),))
        except Exception:
            self._new = new | self._new
            raise

    def _admit_new(self, cluster: Cluster, inventory: _Inventory, queue: str, partition: str, rid: str) -> None:
        limits = cluster.limits
        known = inventory.counts.keys() | inventory.seen.keys()
        if queue not in known and limits.max_queues is not None and len(known) + 1 > limits.max_queues:
            self._limits.decide(cluster, rid, "queues", quota_exceeded(f"queue limit reached ({limits.max_queues})"))
        seen = inventory.seen.get(queue, set())
        most = limits.max_partitions_per_queue
        if most is not None and inventory.partitions(queue) + 1 > most and not self._exists(cluster, queue, partition):
            self._limits.decide(cluster, rid, "partitions", quota_exceeded(f"partition limit reached ({most})"))
        seen.add(partition)
        inventory.seen[queue] = seen
        self._new[cluster.id, queue] = inventory.partitions(queue)

    def _load(self, cluster_id: str) -> _Inventory:
        """The inventory as the database has it; an empty one while that is away, which refuses nobody."""
        counts: dict[str, int] = {}
        if self._pxdb is not None:
            counts = {row["name"]: row["partitions_count"] for row in self._pxdb.rows(_KNOWN, (uuid.UUID(cluster_id),))}
        self._stale.discard(cluster_id)
        inventory = self._clusters.setdefault(cluster_id, _Inventory(counts))
        inventory.counts = counts
        for name in inventory.seen.keys() - counts.keys():
            if (cluster_id, name) not in self._new:
                del inventory.seen[name]
        return inventory
