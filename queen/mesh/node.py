"""One worker as a node of the mesh: its siblings, its peers, and the door of its engine between them.

Every worker dials every peer. The one that is the holder also listens on the mesh's port, and passes what
comes there on to its siblings, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gevent
from gevent import socket

from queen.engine.engine import Engine
from queen.engine.flags import Flag
from queen.engine.hints import Nobody, PartitionKey
from queen.engine.identifiers import uuid_text
from queen.log import Log, Quoted
from queen.mesh.dialler import Dialler, backoff
from queen.mesh.frames import Tag, encode, encode_object, item
from queen.mesh.hello import Doorkeeper, Hello, ReplayGuard, hello, signed_hello
from queen.mesh.inbound import TAGS, Inbound, Source
from queen.mesh.listener import Listener
from queen.mesh.liveness import Liveness
from queen.mesh.local import LocalChannel
from queen.mesh.outbox import Outbox
from queen.mesh.peers import AllowList, Peer, parse_peers
from queen.mesh.seals import Sealer
from queen.mesh.statistics import Numbers, broker_body, no_mesh
from queen.mesh.tls import Tls
from queen.settings import Settings, SettingsError

log = Log("mesh")

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 1.0
_IDLE_SECONDS = 30.0
_BACKLOG = 128
_LINGER_SECONDS = 0.02


class Mesh:
    """The outlet of one worker's engine. Raises `SettingsError` for TLS files and names that can't be used."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._settings = settings
        self._engine = engine
        self._siblings = engine.siblings
        self._secret = _bytes(settings.sync_secret)
        self._peers, self._warnings = parse_peers(settings.mesh_peers, settings.mesh_port)
        if not settings.sync_enabled:
            self._peers = []
        self._tls = Tls(settings) if settings.mesh_tls_ca else None
        self._diallers = [self._dialler(peer) for peer in self._peers]
        self._outbox = Outbox(self._to_all, self._to_peers, settings.hotlist)
        tenancy = settings.tenancy_header
        self._inbound = Inbound(
            engine.hints,
            engine.flags,
            tenancy,
            settings.mesh_verify_flips,
            self._to_siblings,
            settings.mesh_strict,
        )
        engine.hints.answers["mesh"] = lambda _: self._numbers().as_object()
        engine.hints.answers["flag"] = self._take_flag
        self._local = LocalChannel(
            self._siblings,
            settings.server_id,
            Inbound(engine.hints, engine.flags, tenancy),
            engine.hints.answers,
            self._caught_up,
        )
        self._allow = AllowList(settings.mesh_allow, self._peers)
        self._doorkeeper = Doorkeeper(
            (self._secret, _bytes(settings.sync_secret_previous)) if self._secret else (),
            ReplayGuard(settings.mesh_replay_guard),
            settings.allowed_ids(),
            settings.mesh_strict,
            _names(settings),
        )
        self._liveness = Liveness(settings.sync_dead_threshold_ms / 1000)
        self._listener = Listener(
            self._doorkeeper,
            self,
            max(settings.mesh_idle_factor * settings.sync_dead_threshold_ms / 1000, _IDLE_SECONDS),
            settings.mesh_max_connections,
            self._allow,
            self._tls.server if self._tls else None,
        )
        self._loops: list[gevent.Greenlet[[], None]] = []
        self._bind_error: str | None = None

    def start(self) -> None:
        """Opens the channel to the siblings and, with peers, the mesh. Raises `RunDirectoryError`."""
        self._local.start()
        self._inbound.start()
        self._outbox.start()
        self._engine.hints.outlet = self
        if not self._siblings.holder:
            self._dial()
        self._loops.append(gevent.spawn(self._hold))

    def stop(self) -> None:
        """Hangs up everywhere, a moment after the last hints."""
        self._engine.hints.outlet = Nobody()
        self._outbox.flush()
        gevent.sleep(_LINGER_SECONDS)
        gevent.killall(self._loops, block=False)
        self._outbox.stop()
        self._inbound.stop()
        self._listener.stop()
        for dialler in self._diallers:
            dialler.stop()
        self._local.stop()

    # What the engine tells

    @property
    def listening(self) -> bool:
        return bool(self._diallers) or self._local.linked

    def pushed(self, key: PartitionKey) -> None:
        if self._diallers:
            self._outbox.pushed(key, peers=True)
        elif self._local.linked:
            self._outbox.pushed(key, peers=False)

    def notified(self, key: PartitionKey) -> None:
        self._to_all(encode(Tag.MESSAGE_AVAILABLE, item(key)))

    def moved(self, key: PartitionKey, group: bytes) -> None:
        self._outbox.moved(key, group)

    def queue_changed(self, tenant: bytes, queue: bytes, deleted: bool) -> None:
        tag = Tag.QUEUE_CONFIG_DELETE if deleted else Tag.QUEUE_CONFIG_SET
        self._to_all(encode_object(tag, {"queue": queue.decode(), "tenant": uuid_text(tenant)}))

    def flag_changed(self, flag: Flag, enabled: bool) -> None:
        self._to_peers(encode_object(TAGS[flag], {"enabled": enabled}))
        self.ask("flag", {"flag": flag, "enabled": enabled})

    def ask(self, topic: str, value: Any) -> list[Any]:
        return self._local.ask(topic, value, _ANSWER_SECONDS)

    def statistics(self) -> dict[str, Any]:
        if not self._peers:
            return no_mesh()
        own = self._numbers()
        siblings = [Numbers.of_object(answer) for answer in self.ask("mesh", None)]
        return broker_body(self._settings, self._peers, [own, *siblings])

    def _to_all(self, frame: bytes) -> None:
        self._to_siblings(frame)
        self._to_peers(frame)

    def _to_siblings(self, frame: bytes) -> None:
        self._local.offer(frame)

    def _to_peers(self, frame: bytes) -> None:
        for dialler in self._diallers:
            dialler.offer(frame)

    # What the engine hears

    def opened(self, hello: Hello) -> Callable[[int, bytes], None]:
        """A peer dialled the mesh's port. If that is this very broker, the siblings have told it all."""
        if self._local.knows(hello.instance):
            return _ignore
        source = Source(hello.server_id, hello.instance)
        if self._secret and not hello.signed:
            log.info(
                "peer doesn't sign what it sends; with QUEEN_MESH_STRICT it would be refused", peer=hello.server_id
            )
        self._liveness.seen(hello.server_id)
        self._caught_up()

        def take(tag: int, payload: bytes) -> None:
            self._liveness.seen(hello.server_id)
            self._inbound.apply(source, tag, payload)

        return take

    def closed(self, hello: Hello) -> None:
        """Nothing depends on it: a peer counts as alive until it has been silent for long."""

    def _caught_up(self) -> None:
        """Somebody can be heard again: what it said before was missed, so the database is asked."""
        self._inbound.flips.reread()
        self._engine.scan.look()

    def _take_flag(self, value: Any) -> bool:
        """A sibling flipped a flag."""
        return self._engine.hints.hear_flag(Flag(value["flag"]), bool(value["enabled"]))

    # The port

    def _hold(self) -> None:
        """Waits to be the holder, and then listens for peers until the worker ends."""
        self._siblings.wait_holder()
        for warning in self._warnings:
            log.warning(warning)
        if not self._peers:
            if self._settings.sync_enabled:
                log.info("mesh sync enabled but no peers configured — local waker only")
            return
        if not self._secret:
            log.warning(
                "QUEEN_SYNC_SECRET is empty: whoever reaches the mesh port can wake, pause and divert this broker",
                port=self._settings.mesh_port,
            )
        bound = self._bind()
        self._allow.refresh()  # or the first to dial would be strangers
        self._listener.start(bound)
        auth = Quoted("hmac" if self._secret else "off")
        s = self._settings
        strict = {"strict": True} if s.mesh_strict else {}
        log.info("started", server_id=s.server_id, port=s.mesh_port, peers=len(self._peers), auth=auth, **strict)
        self._loops += [gevent.spawn(self._liveness.monitor), gevent.spawn(self._allow.keep_fresh)]
        self._dial()

    def _bind(self) -> socket.socket:
        """The listening socket, tried for until it is to be had."""
        attempts = 0
        while True:
            try:
                bound = _bound(self._settings.mesh_bind_addr, self._settings.mesh_port)
            except OSError as error:
                if self._bind_error is None:
                    message = "TCP mesh bind failed, continuing with local waker only"
                    log.warning(message, port=self._settings.mesh_port, error=error)
                self._bind_error = str(error)
                gevent.sleep(backoff(attempts))
                attempts += 1
            else:
                self._bind_error = None
                return bound

    def _dial(self) -> None:
        for dialler in self._diallers:
            dialler.start()

    def _dialler(self, peer: Peer) -> Dialler:
        s = self._settings
        return Dialler(
            str(peer),
            lambda: self._connect(peer),
            lambda: self._hello(peer),
            s.sync_heartbeat_ms / 1000,
            s.sync_dead_threshold_ms / 1000,
        )

    def _hello(self, peer: Peer) -> tuple[bytes, Sealer | None]:
        server_id, instance = self._settings.server_id, self._siblings.instance
        if not self._secret:
            return hello(server_id, instance, b""), None
        return signed_hello(server_id, instance, self._secret, str(peer))

    def _connect(self, peer: Peer) -> socket.socket:
        connection = socket.create_connection((peer.host, peer.port), timeout=_CONNECT_SECONDS)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A cut cable looks like a peer that is slow to answer; when it is mended, old hints would come first.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self._settings.sync_dead_threshold_ms)
            if self._tls is None:
                return connection
            return self._tls.client.wrap_socket(connection, server_hostname=peer.host)
        except BaseException:
            connection.close()
            raise

    def _numbers(self) -> Numbers:
        """What this worker counted."""
        return Numbers(
            resolved=[dialler.resolved_ip if dialler.connected else None for dialler in self._diallers],
            sent=sum(dialler.sent for dialler in self._diallers),
            dropped=sum(dialler.dropped for dialler in self._diallers),
            received=self._listener.received,
            handshake_failures=self._listener.handshake_failures,
            frames_rejected=self._listener.frames_rejected + self._inbound.rejected,
            nonce_replays=self._doorkeeper.replays,
            peers_refused=self._listener.peers_refused,
            flips_contradicted=self._inbound.flips.contradicted,
            ages=self._liveness.ages(),
            bind_error=self._bind_error,
        )


def _ignore(tag: int, payload: bytes) -> None:
    """What becomes of a broker's own frames."""


def _names(settings: Settings) -> set[str]:
    """What peers may dial this broker by; none: anything. Raises `SettingsError` for one that can't be dialled."""
    names, warnings = parse_peers(settings.mesh_names, settings.mesh_port, "QUEEN_MESH_NAMES")
    if warnings:
        raise SettingsError("; ".join(warnings))
    return {str(name).lower() for name in names}


def _bytes(secret: str) -> bytes:
    """A secret as the environment had it."""
    return secret.encode("utf-8", "surrogateescape")


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, where = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(where)
        bound.listen(_BACKLOG)
    except BaseException:
        bound.close()
        raise
    return bound
