"""Why a cluster may not push: the verdicts of the storage and the monthly quota, and its own state."""

from __future__ import annotations

from queen.proxy.clusters import Cluster
from queen.proxy.refusals import Refusal, quota_exceeded


class PushBlocks:
    """The live verdicts by cluster id; the loops set them, requests obey them, also where limits only log."""

    def __init__(self) -> None:
        self.storage: set[str] = set()
        self.monthly: set[str] = set()

    def cause(self, cluster: Cluster) -> Refusal | None:
        """What refuses a push of the cluster, None when nothing does."""
        if cluster.id in self.storage:
            return Refusal(403, "storage_quota_exceeded", "storage quota exceeded; pushes blocked")
        if cluster.id in self.monthly:
            return quota_exceeded(
                "monthly message quota (monthly_msgs_quota) exhausted; pushes blocked until the next calendar month"
            )
        if cluster.status == "push_blocked":
            return Refusal(403, "push_blocked", "pushes blocked (billing hold)")
        return None

    def quota(self, cluster: Cluster) -> str | None:
        """Which quota blocks pushes, in one word for the console: storage, monthly_quota or None."""
        if cluster.id in self.storage:
            return "storage"
        return "monthly_quota" if cluster.id in self.monthly else None
