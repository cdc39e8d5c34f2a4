"""Leases: extending them, and where this worker knows them to be."""

from __future__ import annotations

from collections import OrderedDict

from queen.db.operations import Operations

_MOST = 65_536


class Leases:
    """The leases a worker handed out lately.

    A lease is a worker id on cursor rows, and no index leads to it, since one would make every pop and
    ack update an index. The worker that granted it knows its partitions; for a lease granted elsewhere
    all cursors are searched. Either way SQL judges.
    """

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._partitions: OrderedDict[bytes, list[bytes]] = OrderedDict()

    def granted(self, lease_id: bytes, partitions: list[bytes]) -> None:
        self._partitions[lease_id] = partitions
        if len(self._partitions) > _MOST:
            self._partitions.popitem(last=False)

    def extend(self, tenant: bytes, lease_id: bytes, seconds: int) -> tuple[int, int | None]:
        """Extends every live lease of this id; how many, and the earliest new expiry (None: no lease)."""
        return self._operations.renew_lease(tenant, lease_id, seconds, self._partitions.get(lease_id))
