"""Clusters and keys as the database has them, kept in memory for a while.

An entry is dropped when the database announces a change of its cluster, and read anew after its time in any
case. While the database is away, entries go on being served for the grace that is set: tenants must not notice
that the proxy's database is restarted.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import gevent
import psycopg
from gevent.event import AsyncResult

from queen.log import Log
from queen.proxy import clusters
from queen.proxy.clusters import Cluster
from queen.proxy.principals import ApiKey
from queen.proxy.pxdb import Pxdb, Unavailable

log = Log("directory")

_FRESH_SECONDS = 30.0
_UNKNOWN_SECONDS = 5.0
_UNKNOWN_MOST = 10_000
_RECHECK_SECONDS = 1.0

T = TypeVar("T")

_COLUMNS = """c.id, c.slug, c.tenant_id, c.tenant_slug, c.tenant_status, c.status, c.broker_tenant_uuid, c.cell_id,
    c.cell_slug, c.base_url, c.cell_secret, c.plan, c.features, c.limit_overrides, c.plan_limits"""
_BY_SLUG = f"SELECT {_COLUMNS} FROM queen_proxy.resolved_clusters c WHERE c.slug = %s"
_BY_ID = f"SELECT {_COLUMNS} FROM queen_proxy.resolved_clusters c WHERE c.id = %s"
_BY_KEY = f"""SELECT k.id AS key_id, k.scopes, {_COLUMNS}
    FROM queen_proxy.api_keys k JOIN queen_proxy.resolved_clusters c ON c.id = k.cluster_id
    WHERE k.key_hash = %s AND k.revoked_at IS NULL"""
_ALL = f"SELECT {_COLUMNS} FROM queen_proxy.resolved_clusters c ORDER BY c.slug"
_USED = "UPDATE queen_proxy.api_keys SET last_used_at = now() WHERE id = ANY (%s)"


@dataclass(slots=True)
class _Entry(Generic[T]):
    value: T
    read_at: float
    fresh_until: float


class _Cache(Generic[T]):
    """Values by key, each read once at a time however many ask."""

    def __init__(self, what: str, grace: float, pxdb: Pxdb) -> None:
        self._what = what
        self._grace = grace
        self._pxdb = pxdb
        self._entries: dict[Hashable, _Entry[T]] = {}
        self._reading: dict[Hashable, AsyncResult[T | None]] = {}
        self._version = 0

    def get(self, key: Hashable, read: Callable[[], T | None]) -> T | None:
        """The value, None when the database has none; raises `Unavailable` when nothing is known."""
        now = time.monotonic()
        entry = self._entries.get(key)
        if entry is not None:
            if now < entry.fresh_until:
                return entry.value
            if self._pxdb.away and now - entry.fresh_until < self._grace:
                entry.fresh_until = now + min(_RECHECK_SECONDS, self._grace)
                self._warn()
                gevent.spawn(self._quietly, key, read)
                return entry.value
        try:
            return self._read(key, read)
        except Unavailable:
            if entry is not None and now - entry.read_at - _FRESH_SECONDS < self._grace:
                self._warn()
                return entry.value
            raise

    def forget(self, wanted: Callable[[T], bool]) -> None:
        """Drops the entries whose value is wanted gone, and what is being read just now."""
        self._version += 1
        self._reading.clear()
        for key in [key for key, entry in self._entries.items() if wanted(entry.value)]:
            del self._entries[key]

    def _warn(self) -> None:
        log.sampled(10, f"pxdb unreachable: serving {self._what} from expired cache")

    def _quietly(self, key: Hashable, read: Callable[[], T | None]) -> None:
        try:
            self._read(key, read)
        except Unavailable:
            return

    def _read(self, key: Hashable, read: Callable[[], T | None]) -> T | None:
        pending = self._reading.get(key)
        if pending is not None:
            return pending.get()
        pending = self._reading[key] = AsyncResult()
        version = self._version
        try:
            value = read()
        except BaseException as error:
            pending.set_exception(error if isinstance(error, Exception) else Unavailable("interrupted"))
            raise
        finally:
            if self._reading.get(key) is pending:
                del self._reading[key]
        now = time.monotonic()
        if value is None:
            self._entries.pop(key, None)
        elif version == self._version:
            # An announcement that came while we read may be about a change we didn't see.
            self._entries[key] = _Entry(value, now, now + _FRESH_SECONDS)
        pending.set(value)
        return value


class Directory:
    """Finds clusters by slug and id, and keys by their text."""

    def __init__(self, pxdb: Pxdb, stale_grace_ms: int) -> None:
        self._pxdb = pxdb
        grace = stale_grace_ms / 1000
        self._clusters: _Cache[Cluster] = _Cache("cluster", grace, pxdb)
        self._keys: _Cache[ApiKey] = _Cache("api key", grace, pxdb)
        self._unknown: dict[str, float] = {}
        self._used_now: set[str] = set()

    def by_slug(self, slug: str) -> Cluster | None:
        """The cluster of a host's first label; raises `Unavailable` when neither database nor memory knows."""
        return self._clusters.get(slug, lambda: self._cluster(_BY_SLUG, slug))

    def by_id(self, text: str) -> Cluster | None:
        """The cluster of an id; raises like `by_slug`."""
        try:
            identifier = uuid.UUID(text)
        except ValueError:
            return None
        return self._clusters.get(identifier, lambda: self._cluster(_BY_ID, identifier))

    def all(self) -> list[Cluster]:
        """Every cluster, read from the database; raises `Unavailable`."""
        return [clusters.from_row(row) for row in self._pxdb.rows(_ALL)]

    def key(self, text: str) -> ApiKey | None:
        """The live key of a plaintext, None when unknown or revoked; raises like `by_slug`."""
        digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
        now = time.monotonic()
        if now < self._unknown.get(digest, 0.0):
            return None
        key = self._keys.get(digest, lambda: self._key(digest))
        if key is None:
            if len(self._unknown) >= _UNKNOWN_MOST:
                self._unknown.clear()
            self._unknown[digest] = now + _UNKNOWN_SECONDS
        return key

    def forget(self, cluster_id: str) -> None:
        """Drops what is known of a cluster and of its keys."""
        self._clusters.forget(lambda cluster: cluster.id == cluster_id)
        self._keys.forget(lambda key: key.cluster.id == cluster_id)
        # A key unknown a moment ago may be the one that was issued just now.
        self._unknown.clear()

    def forget_all(self) -> None:
        """Drops everything, since an announcement may have been missed."""
        self._clusters.forget(lambda _: True)
        self._keys.forget(lambda _: True)
        self._unknown.clear()

    def note_used_keys(self) -> None:
        """Writes when keys were used last: those that were read since the last call; raises `Unavailable`."""
        used, self._used_now = self._used_now, set()
        if used:
            self._pxdb.execute(_USED, ([uuid.UUID(key) for key in used],))

    def _cluster(self, query: str, key: Any) -> Cluster | None:
        row = _decoded(lambda: self._pxdb.row(query, (key,)))
        return None if row is None else _decoded(lambda: clusters.from_row(row))

    def _key(self, digest: str) -> ApiKey | None:
        row = _decoded(lambda: self._pxdb.row(_BY_KEY, (digest,)))
        if row is None:
            return None
        key = _decoded(lambda: ApiKey(str(row["key_id"]), clusters.from_row(row), frozenset(row["scopes"])))
        self._used_now.add(key.id)
        return key


def _decoded(work: Callable[[], T]) -> T:
    """A row that can't be made sense of is no answer, and no reason to turn a tenant away."""
    try:
        return work()
    except (psycopg.Error, KeyError, TypeError, ValueError, AttributeError) as error:
        log.sampled(10, "pxdb gave a row that can't be read", error=repr(error))
        raise Unavailable(str(error)) from error
