"""The order of checks between a request and a broker, and the way of the answer back.

Nothing of a cluster is told before the credential is known to be good: neither that it exists nor its state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from queen.log import Log
from queen.proxy.client import Client, ClientGone, Watch
from queen.proxy.clusters import Cluster
from queen.proxy.forwarding import REQUEST_ID_HEADER, answer_head, request_head, request_id
from queen.proxy.identity import Identity
from queen.proxy.limits import Limits
from queen.proxy.refusals import Refusal, bad_gateway, cluster_suspended, forbidden, route_blocked
from queen.proxy.routes import Class, classify
from queen.proxy.settings import ProxySettings
from queen.proxy.upstream import Broken, Hold, Outgoing, Reply, TimedOut, Unreachable, Upstream

log = Log("gateway")

_ANSWER_MOST = 64 << 20
_AT_ONCE = 65_536
_POP = "/api/v1/pop/queue/"
_EPHEMERAL_POP = "/api/v1/ephemeral/pop"
_WAIT_MS = 30_000
_NO_CONTENT = "204 No Content"


class Gateway:
    """Serves the paths that go to a broker."""

    def __init__(self, settings: ProxySettings, identity: Identity, limits: Limits) -> None:
        self.settings = settings
        self.identity = identity
        self.limits = limits
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
        self.limits.take_request(cluster, rid)
        if is_long_poll(client):
            self._poll(client, cluster, rid)
        else:
            self._forward(client, cluster, rid, None)

    def _poll(self, client: Client, cluster: Cluster, rid: str) -> None:
        """Forwards a long poll: it holds a parked slot, and ends when its client leaves or the proxy stops."""
        if self._stopping:
            client.answer(_NO_CONTENT, b"")
            return
        self.limits.park(cluster, rid)
        hold = Hold()
        self._parked.add(hold)
        try:
            with Watch(client, hold.abort):
                self._forward(client, cluster, rid, hold)
        except ClientGone:
            if client.started or not hold.stopped:
                raise
            client.answer(_NO_CONTENT, b"", [(REQUEST_ID_HEADER, rid)])
        finally:
            self._parked.discard(hold)
            self.limits.unpark(cluster)

    def _forward(self, client: Client, cluster: Cluster, rid: str, hold: Hold | None) -> None:
        upstream = self.upstream(cluster)
        length = client.length
        body, parts = b"", None
        if length is not None and length <= _AT_ONCE:
            body = client.body(_AT_ONCE)
        else:
            parts = client.parts() if length is not None else _chunked(client.parts())
        outgoing = self._outgoing(client.environ, client.target, cluster, upstream, rid, body, parts)
        reply = self._exchange(upstream, outgoing, cluster, rid, hold)
        try:
            self._relay(client, reply, rid)
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

    def _relay(self, client: Client, reply: Reply, rid: str) -> None:
        """Passes an answer on as it arrives, in one piece if it is there already."""
        try:
            if reply.complete:
                body = b"".join(reply.parts())
                length = len(body) if body or client.method != "HEAD" else None
                client.send(answer_head(reply, rid, length), body)
                return
            framed = reply.header(b"content-length") is not None
            chunked = not framed and client.environ["SERVER_PROTOCOL"] != "HTTP/1.0"
            head = answer_head(reply, rid, None)
            client.send(head + (b"Transfer-Encoding: chunked\r\n" if chunked else b""), b"", not framed and not chunked)
            for part in _chunked(reply.parts()) if chunked else reply.parts():
                client.write(part)
        except (TimedOut, Broken):
            raise ClientGone from None


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
