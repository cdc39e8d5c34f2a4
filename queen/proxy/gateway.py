"""The order of checks between a request and a broker, and the way of the answer back.

Nothing of a cluster is told before the credential is known to be good: neither that it exists nor its state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from queen import codec
from queen.log import Log
from queen.proxy import counting
from queen.proxy.admission import Admission
from queen.proxy.client import Client, ClientGone, Watch
from queen.proxy.clusters import Cluster
from queen.proxy.forwarding import REQUEST_ID_HEADER, answer_head, request_head, request_id
from queen.proxy.identity import Identity
from queen.proxy.limits import Limits
from queen.proxy.metering import Meter
from queen.proxy.pxdb import Pxdb, Unavailable
from queen.proxy.quotas import PushBlocks
from queen.proxy.refusals import (
    Refusal,
    bad_gateway,
    cluster_suspended,
    forbidden,
    quota_exceeded,
    route_blocked,
    too_large,
)
from queen.proxy.routes import Class, Route, classify, is_retry
from queen.proxy.settings import ProxySettings
from queen.proxy.upstream import Broken, Hold, Outgoing, Reply, TimedOut, Unreachable, Upstream

log = Log("gateway")

_ANSWER_MOST = 64 << 20
_AT_ONCE = 65_536
_POP = "/api/v1/pop/queue/"
_EPHEMERAL_POP = "/api/v1/ephemeral/pop"
_WAIT_MS = 30_000
_NO_CONTENT = "204 No Content"
_CHUNKED = b"Transfer-Encoding: chunked\r\n"
_API = "/api/v1/"
_PUSH = "/api/v1/push"
_TRANSACTION = "/api/v1/transaction"
_CONFIGURE = "/api/v1/configure"
_EPHEMERAL_PUSH = "/api/v1/ephemeral/push"
_NAMES = {"push": "push", "txn": "transaction", "delivery": "pop"}


class Gateway:
    """Serves the paths that go to a broker."""

    def __init__(
        self,
        settings: ProxySettings,
        identity: Identity,
        limits: Limits,
        blocks: PushBlocks,
        meter: Meter,
        pxdb: Pxdb | None,
    ) -> None:
        self.settings = settings
        self.identity = identity
        self.limits = limits
        self.blocks = blocks
        self.meter = meter
        self.admission = Admission(pxdb, limits, self._exists)
        self._upstreams: dict[str, Upstream] = {}
        self._parked: set[Hold] = set()
        self._stopping = False

    def serve(self, client: Client) -> None:
        """Answers one request."""
        rid = request_id()
        try:
            self._serve(client, rid)
        except Refusal as error:
            if client.started:
                raise
            client.refuse(error, rid)

    def upstream(self, cluster: Cluster) -> Upstream:
        """The brokers of a cluster's cell; raises `Refusal` 502 for a base_url that names none."""
        found = self._upstreams.get(cluster.base_url)
        if found is None:
            s = self.settings
            found = Upstream(cluster.base_url, s.connect_timeout_ms / 1000, s.balance == "spread")
            self._upstreams[cluster.base_url] = found
        return found

    def fetch(
        self, environ: dict[str, Any], cluster: Cluster, target: str, extra: tuple[tuple[str, str], ...] = ()
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """A broker's answer to a request without a body, for a page: status, headers, body.

        ``extra`` are headers to add. Raises `Refusal` 502 and 504.
        """
        upstream = self.upstream(cluster)
        rid = request_id()
        outgoing = self._outgoing(environ, target, cluster, upstream, rid, b"", None, extra)
        reply = self._exchange(upstream, outgoing, cluster, rid)
        try:
            body = _whole(reply, "page")
        finally:
            reply.close()
        head = answer_head(reply, rid, len(body)).decode("latin-1").split("\r\n")[1:-1]
        return reply.status, [(name, value) for line in head for name, _, value in [line.partition(": ")]], body

    def stop(self) -> None:
        """Ends the polls that are parked, now and from here on."""
        self._stopping = True
        for hold in list(self._parked):
            hold.stopped = True
            hold.abort()

    def _serve(self, client: Client, rid: str) -> None:
        route = classify(client.method, client.path)
        if route.of is Class.BLOCKED or (route.of is Class.OPERATOR and not self.settings.operator_enabled):
            raise route_blocked()
        cluster, who = self.identity.identify(client)
        if cluster.closed:
            raise cluster_suspended()
        if route.feature and route.feature not in cluster.features:
            raise Refusal(403, "feature_gated", "not in your plan")
        if not who.may(route):
            if route.of is Class.OPERATOR:
                raise route_blocked()
            raise forbidden("operation not permitted for this credential")
        blocked = self.blocks.cause(cluster)
        if blocked and (route.of is Class.PRODUCE or route.kind == "grow" or _is_retry(client)):
            raise blocked
        self.limits.take_request(cluster, rid)
        if is_long_poll(client):
            self._poll(client, cluster, route, rid)
            return
        work = Work(cluster, route, rid, op_class(client, route))
        self._check(client, work, blocked)
        self._forward(client, work, None)

    def _check(self, client: Client, work: Work, blocked: Refusal | None) -> None:
        """Reads the bodies that are counted or looked into, and holds them against the plan."""
        cluster, rid, path = work.cluster, work.rid, client.path
        mixed = blocked is not None and work.route.kind == "mixed"
        push, transaction, ephemeral = path == _PUSH, path == _TRANSACTION, path == _EPHEMERAL_PUSH
        if client.method != "POST" or not (push or transaction or ephemeral or mixed or path == _CONFIGURE):
            return
        body = work.body = client.body(self.settings.max_body_bytes)
        if blocked is not None and mixed and counting.grows(body, work.route.feature == "streams"):
            raise blocked
        limits = cluster.limits
        try:
            if push:
                load = counting.of_push(body, limits.max_payload_bytes)
            elif transaction:
                load = counting.of_transaction(body, limits.max_payload_bytes)
            elif ephemeral:
                load = counting.of_ephemeral(body)
            else:
                if path == _CONFIGURE:
                    self._check_configure(cluster, body, rid)
                return
        except counting.Unreadable as error:
            log.sampled(10, "a body is not what its route takes; left to the broker", cluster=cluster.slug, error=error)
            return
        work.count = load.count
        self._check_load(cluster, load, rid)

    def _check_load(self, cluster: Cluster, load: counting.Load, rid: str) -> None:
        limits = cluster.limits
        if load.oversized is not None:
            index, size = load.oversized
            raise too_large(
                f"item {index}: payload {size} bytes exceeds max_payload_bytes ({limits.max_payload_bytes})"
            )
        most = self.settings.max_batch_items if limits.max_batch_items is None else limits.max_batch_items
        if load.count > most:
            raise too_large(f"batch of {load.count} items exceeds max_batch_items ({most})")
        self._admit(cluster, load.places, rid)
        self.limits.take_messages(cluster, load.count, rid)

    def _check_configure(self, cluster: Cluster, body: bytes, rid: str) -> None:
        queue, retentions = counting.retention(body)
        ceiling = cluster.limits.max_retention_seconds
        for name, seconds in retentions:
            if ceiling is not None and seconds > ceiling:
                text = f"{name} of {seconds}s exceeds the plan's max_retention_seconds ({ceiling}s)"
                self.limits.decide(cluster, rid, "retention", quota_exceeded(text))
        self._admit(cluster, [(queue, "Default")], rid)

    def _admit(self, cluster: Cluster, places: Iterable[tuple[str, str]], rid: str) -> None:
        try:
            self.admission.admit(cluster, places, rid)
        except Unavailable as error:
            log.sampled(10, "queues are not counted while pxdb is away", cluster=cluster.slug, error=error)

    def _exists(self, cluster: Cluster, queue: str, partition: str) -> bool:
        """Whether the broker has a partition; no when it can't be asked."""
        try:
            target = f"/api/v1/resources/queues/{quote(queue, safe='')}"
            status, _, body = self.fetch({"REQUEST_METHOD": "GET"}, cluster, target)
            return status == 200 and any(one["name"] == partition for one in codec.loads(body)["partitions"])
        except (Refusal, codec.JsonError, KeyError, TypeError):
            return False

    def _poll(self, client: Client, cluster: Cluster, route: Route, rid: str) -> None:
        """Forwards a long poll: it holds a parked slot, and ends when its client leaves or the proxy stops."""
        if self._stopping:
            client.answer(_NO_CONTENT, b"")
            return
        self.limits.park(cluster, rid)
        hold = Hold()
        self._parked.add(hold)
        try:
            with Watch(client, hold.abort):
                self._forward(client, Work(cluster, route, rid, "delivery"), hold)
        except ClientGone:
            if client.started or not hold.stopped:
                raise
            client.answer(_NO_CONTENT, b"", [(REQUEST_ID_HEADER, rid)])
        finally:
            self._parked.discard(hold)
            self.limits.unpark(cluster)

    def _forward(self, client: Client, work: Work, hold: Hold | None) -> None:
        cluster, rid = work.cluster, work.rid
        upstream = self.upstream(cluster)
        parts = None
        if work.body is None:
            length = client.length
            if length is not None and length <= _AT_ONCE:
                work.body = client.body(_AT_ONCE)
            else:
                parts = client.parts() if length is not None else _chunked(client.parts())
        body = work.body or b""
        outgoing = self._outgoing(client.environ, client.target, cluster, upstream, rid, body, parts)
        try:
            reply = self._exchange(upstream, outgoing, cluster, rid, hold)
        except Refusal:
            self.meter.add(cluster.id, work.op, 0, len(body), 0)
            raise
        try:
            self._relay(client, reply, work)
        finally:
            reply.close()

    def _outgoing(
        self,
        environ: dict[str, Any],
        target: str,
        cluster: Cluster,
        upstream: Upstream,
        rid: str,
        body: bytes,
        parts: Iterator[bytes] | None = None,
        extra: tuple[tuple[str, str], ...] = (),
    ) -> Outgoing:
        s = self.settings
        method = environ["REQUEST_METHOD"]
        path, _, query = target.partition("?")
        length: int | None = len(body)
        if parts is not None:
            length = int(environ["CONTENT_LENGTH"]) if "HTTP_TRANSFER_ENCODING" not in environ else None
        head = request_head(
            environ, target, cluster, upstream.authority, rid, length, s.tenant_header, s.cookie_name, extra
        )
        pop = path.startswith(_POP) or path == _EPHEMERAL_POP
        pairs = query.split("&")
        again = parts is None and method in ("GET", "HEAD") and (not pop or "autoAck=true" not in pairs)
        waits = pop and "wait=true" in pairs
        budget = s.upstream_timeout_ms / 1000
        if waits:
            budget = (min(wait_ms(pairs), s.longpoll_max_ms) + s.longpoll_margin_ms) / 1000
        return Outgoing(head, body, budget, parts, method == "HEAD", again, again and waits)

    def _exchange(
        self, upstream: Upstream, outgoing: Outgoing, cluster: Cluster, rid: str, hold: Hold | None = None
    ) -> Reply:
        """The answer's head; raises `Refusal` 502 or 504, and `ClientGone` for an aborted exchange."""
        try:
            return upstream.exchange(outgoing, hold)
        except TimedOut:
            log.warning("upstream timeout (not billed)", cluster=cluster.slug, rid=rid)
            raise Refusal(504, "upstream_timeout", "upstream timeout") from None
        except (Unreachable, Broken) as error:
            if hold is not None and hold.aborted:
                raise ClientGone from None
            log.warning("upstream error (not billed)", cluster=cluster.slug, rid=rid, error=error)
            raise bad_gateway("upstream unreachable") from None

    def _relay(self, client: Client, reply: Reply, work: Work) -> None:
        """Counts an answer and passes it on: in one piece what is counted or here already, else as it arrives."""
        rid = work.rid
        if _is_counted(work, reply.status):
            body = _whole(reply, _NAMES[work.op])
            self._count(work, reply, body)
            client.send(answer_head(reply, rid, len(body)), body)
            return
        if reply.status >= 500:
            log.warning("upstream 5xx (not billed)", cluster=work.cluster.slug, rid=rid, status=reply.status)
        try:
            whole = b"".join(reply.parts()) if reply.complete else None
            told = reply.header(b"content-length")
            size = len(whole) if whole is not None else int(told) if told and told.isdigit() else 0
            billed = 1 if _is_retry(client) and reply.status < 300 else 0
            self.meter.add(work.cluster.id, "push" if billed else work.op, billed, len(work.body or b""), size)
            if whole is not None:
                length = None if client.method == "HEAD" else len(whole)
                client.send(answer_head(reply, rid, length), whole)
                return
            framed = told is not None
            chunked = not framed and client.environ["SERVER_PROTOCOL"] != "HTTP/1.0"
            head = answer_head(reply, rid, None)
            client.send(head + (_CHUNKED if chunked else b""), b"", not framed and not chunked)
            for part in _chunked(reply.parts()) if chunked else reply.parts():
                client.write(part)
        except (TimedOut, Broken):
            raise ClientGone from None

    def _count(self, work: Work, reply: Reply, body: bytes) -> None:
        """Bills the messages of an answer that was read whole."""
        msgs = 0
        try:
            plain = counting.plain(body, reply.header(b"content-encoding"))
            if work.op == "delivery":
                msgs = counting.delivered(plain)
                self.limits.charge_delivered(work.cluster, msgs)
            elif work.op == "txn":
                msgs = counting.transacted(plain, work.count)
            elif work.route.of is Class.GATED:
                msgs = counting.ephemeral(plain)
            else:
                msgs, buffered = counting.pushed(plain)
                if 2 * buffered > msgs:
                    log.sampled(30, "the cell is spooling pushes to disk", cluster=work.cluster.slug)
        except counting.Unreadable as error:
            log.sampled(10, "an answer can't be counted", cluster=work.cluster.slug, op=work.op, error=error)
        self.meter.add(work.cluster.id, work.op, msgs, len(work.body or b""), len(body))


@dataclass(slots=True)
class Work:
    """A request on its way: its cluster and class, the body if it was read, the messages counted in it."""

    cluster: Cluster
    route: Route
    rid: str
    op: str
    body: bytes | None = None
    count: int = 0


def op_class(client: Client, route: Route) -> str:
    """Under which name a request is metered."""
    path = client.path
    if path in (_PUSH, _EPHEMERAL_PUSH):
        return "push"
    if path == _TRANSACTION:
        return "txn"
    if path.startswith(_POP) or path == _EPHEMERAL_POP:
        return "delivery"
    return "configure" if route.of is Class.QUEUE_ADMIN else "read"


def _is_counted(work: Work, status: int) -> bool:
    if work.op == "push":
        return status in (200, 201)
    return (work.op == "txn" and 200 <= status < 300) or (work.op == "delivery" and status == 200)


def _is_retry(client: Client) -> bool:
    return client.method == "POST" and client.path.startswith(_API) and is_retry(client.path[len(_API) :])


def is_long_poll(client: Client) -> bool:
    """Whether a request waits at the broker for messages."""
    path = client.path
    return (path.startswith(_POP) or path == _EPHEMERAL_POP) and "wait=true" in client.query.split("&")


def wait_ms(pairs: list[str]) -> int:
    """How long a long poll asks the broker to wait, in ms."""
    for pair in pairs:
        if pair.startswith("timeout="):
            text = pair[8:]
            return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else _WAIT_MS
    return _WAIT_MS


def _chunked(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Parts in the framing of chunks."""
    for part in parts:
        yield b"%x\r\n%s\r\n" % (len(part), part)
    yield b"0\r\n\r\n"


def _whole(reply: Reply, what: str) -> bytes:
    """An answer's whole body; raises `Refusal` 502 when it is too large or breaks off, 504 when it stalls."""
    parts = []
    size = 0
    try:
        for part in reply.parts():
            size += len(part)
            if size > _ANSWER_MOST:
                raise bad_gateway(f"{what} response too large")
            parts.append(part)
    except TimedOut:
        raise Refusal(504, "upstream_timeout", "upstream timeout") from None
    except Broken:
        raise bad_gateway("upstream unreachable") from None
    return parts[0] if len(parts) == 1 else b"".join(parts)
