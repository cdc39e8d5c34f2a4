"""Asks the brokers what each cluster holds: queues that are gone free their place, storage is held to its quota."""

from __future__ import annotations

import time
import uuid
from typing import Any

from queen import codec
from queen.log import Log
from queen.proxy.admission import Admission
from queen.proxy.clusters import Cluster
from queen.proxy.directory import Directory
from queen.proxy.gateway import Gateway
from queen.proxy.pxdb import Pxdb
from queen.proxy.quotas import PushBlocks
from queen.proxy.refusals import Refusal

log = Log("limits")

_TARGET = "/api/v1/resources/queues"
_CONFIRM = "SELECT queen_proxy.confirm_queues(%s, %s, %s, %s)"
_RELEASE = 0.9


class Reconciler:
    """Looks at every cluster, one after the other."""

    def __init__(
        self, pxdb: Pxdb, directory: Directory, gateway: Gateway, admission: Admission, blocks: PushBlocks
    ) -> None:
        self._pxdb = pxdb
        self._directory = directory
        self._gateway = gateway
        self._admission = admission
        self._blocks = blocks
        self._over: set[str] = set()

    def run(self) -> None:
        """One pass; raises `Unavailable`."""
        clusters = self._directory.all()
        for cluster in clusters:
            if not cluster.closed:
                self._look_at(cluster)
        self._over &= {cluster.id for cluster in clusters}
        self._apply({cluster.id: cluster for cluster in clusters})

    def _look_at(self, cluster: Cluster) -> None:
        earlier = self._admission.names(cluster.id)
        started = time.monotonic()
        queues = self._queues(cluster)
        if queues is None:
            return
        counts = {queue["name"]: max(0, _number(queue.get("partitions")) or 0) for queue in queues}
        age = time.monotonic() - started + 1
        names = list(counts)
        self._pxdb.execute(_CONFIRM, (uuid.UUID(cluster.id), names, [counts[name] for name in names], age))
        self._admission.confirm(cluster.id, counts, earlier)
        sizes = [_number(queue.get("retainedBytes")) for queue in queues]
        if None not in sizes:
            self._judge(cluster, sum(size or 0 for size in sizes))

    def _judge(self, cluster: Cluster, held: int) -> None:
        quota = cluster.limits.max_retained_bytes
        if quota is not None and held > quota:
            self._over.add(cluster.id)
        elif quota is None or held <= quota * _RELEASE:
            self._over.discard(cluster.id)

    def _apply(self, clusters: dict[str, Cluster]) -> None:
        for cluster_id in self._over - self._blocks.storage:
            log.warning("storage quota exceeded; pushes blocked", cluster=clusters[cluster_id].slug)
        for cluster_id in self._blocks.storage - self._over:
            slug = clusters[cluster_id].slug if cluster_id in clusters else cluster_id
            log.info("storage back under quota; pushes unblocked", cluster=slug)
        self._blocks.storage = set(self._over)

    def _queues(self, cluster: Cluster) -> list[dict[str, Any]] | None:
        """What the broker lists, None when it gave no answer to go by."""
        environ = {"REQUEST_METHOD": "GET"}
        try:
            status, _, body = self._gateway.fetch(environ, cluster, _TARGET)
            queues = codec.loads(body)["queues"] if status == 200 else None
        except (Refusal, codec.JsonError, KeyError, TypeError) as error:
            log.sampled(60, "a cluster's queues can't be listed", cluster=cluster.slug, error=error)
            return None
        if not isinstance(queues, list) or not all(isinstance(one, dict) and "name" in one for one in queues):
            return None
        return queues


def _number(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
