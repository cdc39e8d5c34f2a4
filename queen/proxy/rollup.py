"""Minutes to days, old minutes away, and the monthly quota."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime

from psycopg.types.json import Jsonb

from queen.log import Log
from queen.proxy.clusters import Cluster
from queen.proxy.directory import Directory
from queen.proxy.pxdb import Pxdb
from queen.proxy.quotas import PushBlocks

log = Log("limits")

_MONTH = "SELECT queen_proxy.cluster_month_msgs(%s, %s) AS msgs"
_TOLD = """SELECT 1 FROM queen_proxy.outbox
    WHERE kind = %s AND payload ->> 'cluster_id' = %s AND payload ->> 'month' = %s LIMIT 1"""
_TELL = "SELECT queen_proxy.emit_outbox(%s, %s)"


class Rollup:
    """One tick: sums, prunes, and judges the month of every cluster."""

    def __init__(self, pxdb: Pxdb, directory: Directory, blocks: PushBlocks, keep_days: int, warn_percent: int) -> None:
        self._pxdb = pxdb
        self._directory = directory
        self._blocks = blocks
        self._keep_days = keep_days
        self._warn_percent = warn_percent

    def run(self) -> None:
        """Raises `Unavailable`; then what comes later waits for the next tick."""
        self._pxdb.execute("SELECT queen_proxy.rollup_usage_days()")
        self._pxdb.execute("SELECT queen_proxy.prune_usage_minutes(%s)", (self._keep_days,))
        clusters = self._directory.all()
        for cluster in clusters:
            self._judge(cluster)
        self._blocks.monthly &= {cluster.id for cluster in clusters}

    def _judge(self, cluster: Cluster) -> None:
        quota = cluster.limits.monthly_msgs_quota
        if quota is None:
            self._blocks.monthly.discard(cluster.id)
            return
        month = datetime.now(UTC).date().replace(day=1)
        row = self._pxdb.row(_MONTH, (uuid.UUID(cluster.id), month))
        used = int(row["msgs"]) if row else 0
        event = {"cluster_id": cluster.id, "month": f"{month:%Y-%m}", "messages": used, "quota": quota}
        if used * 100 >= quota * self._warn_percent:
            self._tell("cluster_monthly_quota_warning", event)
        if used >= quota:
            self._tell("cluster_monthly_quota_blocked", event)
            self._blocks.monthly.add(cluster.id)
        else:
            self._blocks.monthly.discard(cluster.id)

    def _tell(self, kind: str, event: dict[str, object]) -> None:
        """Once for each cluster and month, also across restarts."""
        if self._pxdb.row(_TOLD, (kind, event["cluster_id"], event["month"])) is None:
            self._pxdb.rows(_TELL, (kind, Jsonb(event)))
            log.warning(kind.replace("_", " "), cluster_id=event["cluster_id"], msgs=event["messages"])
