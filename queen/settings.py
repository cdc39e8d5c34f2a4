"""Every environment variable of the broker: name, aliases, default and bounds, read once at boot.

`Settings.read` turns an environment into typed values. Booleans are strict, since a misspelt
``JWT_ENABLED`` must not leave a broker open: a wrong one raises `SettingsError` naming variable, value
and what is allowed. A wrong number means the default, with a warning in `Settings.warnings`, or an error
under ``QUEEN_STRICT_BOOT``.
"""

from __future__ import annotations

import ipaddress
import math
import os
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
_BEYOND = 1 << 63
_HEX = frozenset("0123456789abcdefABCDEF")
KEY_DIGITS = 64
JWT_ALGORITHMS = ("HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "EdDSA")


class SettingsError(Exception):
    """One or more variables can't be used; the message names each with its value and the remedy."""


def parse_boolean(name: str, value: str) -> bool:
    """``true/false, 1/0, yes/no, on/off`` in any case; raises `SettingsError` for anything else."""
    word = value.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise SettingsError(f'{name}="{value}" is not a boolean (expected true/false, 1/0, yes/no, on/off)')


@dataclass(frozen=True, slots=True)
class Variable:
    """How one setting is read: the names tried in order, its kind, bounds and what it is for."""

    names: tuple[str, ...]
    kind: str
    about: str
    minimum: float | None = None
    maximum: float | None = None
    secret: bool = False
    clamp: bool = True  # a number out of bounds becomes the nearest bound, else the default


def _setting(
    names: str,
    default: Any,
    about: str,
    minimum: float | None = None,
    maximum: float | None = None,
    clamp: bool = True,
) -> Any:
    kind = type(default).__name__
    return field(
        default=default,
        metadata={"variable": Variable(tuple(names.split()), kind, about, minimum, maximum, clamp=clamp)},
    )


def _secret(name: str, default: str, about: str) -> Any:
    """A text that no log line may show."""
    return field(default=default, metadata={"variable": Variable((name,), "str", about, secret=True)})


@dataclass(frozen=True, slots=True)
class Settings:
    """The broker's configuration in force. Field order is the order of the documentation."""

    # Server and logging
    port: int = _setting("PORT", 6632, "HTTP port", 1, 65535)
    bind_addr: str = _setting("QUEEN_BIND_ADDR", "0.0.0.0", "HTTP listen host, without a port")
    max_body_bytes: int = _setting("QUEEN_MAX_BODY_BYTES", 67_108_864, "request body cap; 413 above it", 1)
    body_room_mb: int = _setting(
        "QUEEN_BODY_ROOM_MB", 512, "memory of a worker for bodies that are being received; 503 above it", 1
    )
    body_timeout_ms: int = _setting(
        "QUEEN_BODY_TIMEOUT_MS", 120_000, "a request body that takes longer to come is given up with 408", 1000
    )
    log_level: str = _setting("RUST_LOG LOG_LEVEL", "info", "log filter, as in info,fusion=debug")
    log_json: bool = _setting("QUEEN_LOG_JSON", False, "log one JSON object a line")
    server_id: str = _setting("QUEEN_SERVER_ID HOSTNAME", "", "name of this broker; default: the host name")
    strict_boot: bool = _setting("QUEEN_STRICT_BOOT", False, "an unusable number refuses to boot")

    # PostgreSQL
    pg_host: str = _setting("PG_HOST", "localhost", "host, or several separated by commas")
    pg_port: str = _setting("PG_PORT", "5432", "port, or one per host separated by commas")
    pg_user: str = _setting("PG_USER", "postgres", "user")
    pg_password: str = _secret("PG_PASSWORD", "postgres", "password")
    pg_database: str = _setting("PG_DATABASE PG_DB", "postgres", "database")
    pg_use_ssl: bool = _setting("PG_USE_SSL", False, "connect by TLS, and not otherwise")
    pg_ssl_reject_unauthorized: bool = _setting(
        "PG_SSL_REJECT_UNAUTHORIZED", True, "check the server's certificate and host name; always so with a CA given"
    )
    pg_ssl_root_cert: str = _setting(
        "PG_SSL_ROOT_CERT",
        "",
        "the only CAs to trust, as PEM text, whose line ends may be spelt with a backslash and an n",
    )
    pool_size: int = _setting(
        "DB_POOL_SIZE",
        160,
        "most connections of a broker, divided among its workers; lowered to what the server offers",
        2,
    )
    statement_timeout_ms: int = _setting(
        "QUEEN_STMT_TIMEOUT_MS", 30_000, "a statement running longer is cancelled on the server", 1
    )
    apply_schema: bool = _setting("QUEEN_APPLY_SCHEMA", True, "create and update the schema at boot")

    # Pops and long polls
    pop_timeout_ms: int = _setting(
        "DEFAULT_TIMEOUT POP_DEFAULT_TIMEOUT_MS", 30_000, "long-poll wait when the request names none", 1
    )
    subscription_mode: str = _setting(
        "DEFAULT_SUBSCRIPTION_MODE", "new", "where a new named group starts: new, else all"
    )
    pop_wait_initial_ms: int = _setting("POP_WAIT_INITIAL_INTERVAL_MS", 100, "first re-poll of a parked pop", 1)
    pop_wait_threshold: int = _setting("POP_WAIT_BACKOFF_THRESHOLD", 3, "re-polls before backing off", 0)
    pop_wait_multiplier: float = _setting("POP_WAIT_BACKOFF_MULTIPLIER", 2.0, "growth of the re-poll interval", 0.1)
    pop_wait_max_ms: int = _setting("POP_WAIT_MAX_INTERVAL_MS", 1000, "longest re-poll interval", 1)
    pop_pending_gate: bool = _setting("QUEEN_POP_PENDING_GATE", True, "probe cheaply before a re-poll's claim")

    # Write path
    zstd_level: int = _setting("QUEEN_V2_ZSTD_LEVEL", 1, "compression of segments; 0 stores them as they are", 0, 19)
    bundle_max: int = _setting("QUEEN_V2_BUNDLE_MAX", 16, "partitions in one push transaction", 1)
    fusion_max_inflight: int = _setting("QUEEN_V2_FUSION_MAX_INFLIGHT", 4, "push transactions at once", 1)
    push_queue_kb: int = _setting(
        "QUEEN_PUSH_QUEUE_KB", 32_768, "pushes under way at a time, and as much in line; above it they get a 503", 64
    )
    dedup_cache: bool = _setting("QUEEN_DEDUP_CACHE", True, "remember hashes so that pushes need no probe")
    dedup_cache_mb: int = _setting("QUEEN_DEDUP_CACHE_MB", 512, "memory of that cache", 1)
    segment_cache_mb: int = _setting(
        "QUEEN_SEGMENT_CACHE_MB", 64, "memory for frames pushed or read lately, which pops then need not fetch", 1
    )
    pop_fusion: bool = _setting("QUEEN_POP_FUSION", True, "let pops that come together share a transaction")

    # Hot-list
    hotlist: bool = _setting("QUEEN_HOTLIST", True, "propose partitions to pops from memory")
    hotlist_reseed_ms: int = _setting(
        "QUEEN_HOTLIST_RESEED_MS", 30_000, "how often a ring looks for partitions written lately", 1
    )
    hotlist_reseed_full_ms: int = _setting(
        "QUEEN_HOTLIST_RESEED_FULL_MS",
        300_000,
        "how often a ring is filled in full; 0: every reseed is full",
        0,
    )
    hotlist_idle_sweep_ms: int = _setting(
        "QUEEN_HOTLIST_IDLE_SWEEP_MS", 300_000, "forget a queue nobody popped for this long; 0: never", 0
    )

    # Mesh and sibling workers
    sync_enabled: bool = _setting("QUEEN_SYNC_ENABLED", True, "talk to the peers; without any there is no mesh")
    mesh_peers: str = _setting(
        "QUEEN_MESH_PEERS QUEEN_UDP_PEERS", "", "the other brokers, host or host:port separated by commas"
    )
    mesh_port: int = _setting(
        "QUEEN_MESH_PORT QUEEN_UDP_NOTIFY_PORT",
        6633,
        "TCP port of the mesh; the default when it is out of bounds",
        1,
        65535,
        clamp=False,
    )
    mesh_bind_addr: str = _setting(
        "QUEEN_MESH_BIND_ADDR", "", "mesh listen host, without a port; default: QUEEN_BIND_ADDR"
    )
    sync_secret: str = _secret("QUEEN_SYNC_SECRET", "", "what peers must know to connect; empty: nothing")
    sync_secret_previous: str = _secret(
        "QUEEN_SYNC_SECRET_PREVIOUS", "", "a second secret that is accepted too, while the first is being replaced"
    )
    sync_heartbeat_ms: int = _setting("QUEEN_SYNC_HEARTBEAT_MS", 1000, "how often an idle peer is written to", 1)
    sync_dead_threshold_ms: int = _setting(
        "QUEEN_SYNC_DEAD_THRESHOLD_MS", 5000, "silence after which a peer is reported dead", 1
    )
    mesh_idle_factor: float = _setting(
        "QUEEN_MESH_IDLE_FACTOR", 3.0, "a silent connection is closed after so many times that, or 30 s if longer", 1
    )
    mesh_max_connections: int = _setting(
        "QUEEN_MESH_MAX_CONNECTIONS", 64, "accepted mesh connections; each worker of each peer makes one", 1
    )
    mesh_allow: str = _setting(
        "QUEEN_MESH_ALLOW", "any", "who may connect: any, peers, or networks separated by commas"
    )
    mesh_allowed_ids: str = _setting(
        "QUEEN_MESH_ALLOWED_IDS", "", "the names of brokers that may connect, separated by commas; empty: any"
    )
    mesh_replay_guard: str = _setting(
        "QUEEN_MESH_REPLAY_GUARD", "refuse", "a handshake that was used before, with a secret: refuse, log or off"
    )
    mesh_verify_flips: bool = _setting(
        "QUEEN_MESH_VERIFY_FLIPS", False, "ask the database before a peer's maintenance flip is believed"
    )
    mesh_strict: bool = _setting(
        "QUEEN_MESH_STRICT",
        False,
        "listen only to peers that sign every frame, and believe no flip that the database doesn't confirm",
    )
    mesh_names: str = _setting(
        "QUEEN_MESH_NAMES", "", "with that, what peers dial this broker by, host or host:port; empty: anything"
    )
    mesh_tls_cert: str = _setting("QUEEN_MESH_TLS_CERT", "", "this broker's certificate (PEM file); all three or none")
    mesh_tls_key: str = _setting("QUEEN_MESH_TLS_KEY", "", "its private key")
    mesh_tls_ca: str = _setting("QUEEN_MESH_TLS_CA", "", "the authority of every broker's certificate")
    run_dir: str = _setting(
        "QUEEN_RUN_DIR", "", "where the workers of one broker meet; default: $RUNTIME_DIRECTORY, else a temporary one"
    )

    # Jobs
    retention_interval_ms: int = _setting("RETENTION_INTERVAL", 5000, "how often retention looks for what is due", 1)
    retention_batch_size: int = _setting(
        "RETENTION_BATCH_SIZE", 1000, "rows deleted under one lock of a partition; pushes to it wait meanwhile", 1
    )
    retention_parallelism: int = _setting("RETENTION_PARALLELISM", 1, "partitions retention works on at a time", 1, 16)
    retention_due_cap: int = _setting(
        "QUEEN_RETENTION_DUE_CAP", 0, "partitions looked at in one cycle; 0: batch size x parallelism x 5", 0
    )
    retention_safety_walk_ms: int = _setting(
        "QUEEN_RETENTION_SAFETY_WALK_MS", 86_400_000, "how often every partition's ages are checked; 0: never", 0
    )
    metrics_retention_days: int = _setting(
        "METRICS_RETENTION_DAYS", 90, "how long metrics and the history of retention are kept", 1
    )
    partition_cleanup: bool = _setting("QUEEN_PARTITION_CLEANUP_ENABLED", True, "remove partitions left empty")
    partition_cleanup_days: int = _setting("PARTITION_CLEANUP_DAYS", 30, "how long they must have been idle", 1)
    stats_interval_ms: int = _setting("STATS_INTERVAL_MS", 10_000, "how often statistics are computed", 1000)
    retained_bytes_interval_ms: int = _setting(
        "RETAINED_BYTES_INTERVAL_MS", 600_000, "how often stored bytes are added up, which reads every segment", 1000
    )
    metrics_flush_ms: int = _setting("METRICS_FLUSH_MS", 60_000, "how often a worker writes its metrics", 1000)
    cache_refresh_ms: int = _setting(
        "QUEEN_CACHE_REFRESH_INTERVAL_MS", 60_000, "how often flags and caches are brought up to date", 1
    )

    # Authentication and tenants
    jwt_enabled: bool = _setting("JWT_ENABLED", False, "ask for a token on every route but the public ones")
    jwt_algorithm: str = _setting(
        "JWT_ALGORITHM",
        "HS256",
        "tokens accepted: HS256, HS384, HS512, RS384, RS512, EdDSA (that one), RS256 (all RS) or auto (all seven)",
    )
    jwt_secret: str = _secret("JWT_SECRET", "", "key of HS tokens; 32 bytes or more, drawn at random")
    jwt_public_key: str = _secret("JWT_PUBLIC_KEY", "", "key of RS and EdDSA tokens: the PEM text, not a path")
    jwt_jwks_url: str = _setting("JWT_JWKS_URL", "", "where their keys are fetched when there is no JWT_PUBLIC_KEY")
    jwt_jwks_refresh_seconds: int = _setting(
        "JWT_JWKS_REFRESH_INTERVAL", 3600, "how often, in seconds; an unknown key id has them fetched at once", 1
    )
    jwt_jwks_timeout_ms: int = _setting("JWT_JWKS_TIMEOUT_MS", 5000, "how long that may take", 1)
    jwt_issuer: str = _setting("JWT_ISSUER", "", "what the claim iss must be; empty: anything")
    jwt_audience: str = _setting("JWT_AUDIENCE", "", "what the claim aud must be or contain; empty: anything")
    jwt_clock_skew: int = _setting("JWT_CLOCK_SKEW", 30, "seconds by which clocks may differ", 0)
    jwt_require_exp: bool = _setting("JWT_REQUIRE_EXP", False, "refuse a token that never expires")
    jwt_skip_paths: str = _setting(
        "JWT_SKIP_PATHS",
        "/health,/metrics/prometheus,/metrics,/",
        "paths that need no token, separated by commas; one that ends in / stands for all below it",
    )
    jwt_roles_claim: str = _setting("JWT_ROLES_CLAIM", "role", "claim with one role")
    jwt_roles_array_claim: str = _setting("JWT_ROLES_ARRAY_CLAIM", "roles", "claim with an array of roles")
    jwt_role_admin: str = _setting("JWT_ROLE_ADMIN", "admin", "what the role admin is called in tokens")
    jwt_role_read_write: str = _setting("JWT_ROLE_READ_WRITE", "read-write", "the same for read-write")
    jwt_role_read_only: str = _setting("JWT_ROLE_READ_ONLY", "read-only", "the same for read-only")
    jwt_role_write_only: str = _setting("JWT_ROLE_WRITE_ONLY", "write-only", "the same for write-only")
    jwt_tenant_claim: str = _setting(
        "JWT_TENANT_CLAIM", "", "claim with the one tenant a token is for; only admin tokens may do without it"
    )
    tenancy_header: bool = _setting(
        "QUEEN_TENANCY_HEADER", False, "take the tenant from the header x-queen-tenant; needs the next one"
    )
    kv_trusted_proxy: bool = _setting(
        "QUEEN_KV_TRUSTED_PROXY", False, "your word that a proxy sets that header and removes what clients send"
    )
    trusted_proxy_cidrs: str = _setting(
        "QUEEN_TRUSTED_PROXY_CIDRS", "", "networks that may send that header, separated by commas; empty: any"
    )

    # Encryption at rest
    encryption_key: str = _secret("QUEEN_ENCRYPTION_KEY", "", "key of encrypted queues: 64 hexadecimal digits")
    encryption_keys_old: str = _secret(
        "QUEEN_ENCRYPTION_KEYS_OLD", "", "former keys, separated by commas, that payloads are still read with"
    )
    encryption_required: bool = _setting(
        "QUEEN_ENCRYPTION_REQUIRED",
        True,
        "an unusable key refuses to boot, and what can't be encrypted is refused; otherwise it is stored as it is",
    )

    # Spool
    file_buffer_dir: str = _setting(
        "FILE_BUFFER_DIR", "/var/lib/queen/buffers", "the broker's own directory for pushes that wait for PostgreSQL"
    )
    file_buffer_flush_ms: int = _setting("FILE_BUFFER_FLUSH_MS", 100, "how often the spool looks what to drain", 1)
    file_buffer_max_batch: int = _setting("FILE_BUFFER_MAX_BATCH", 100, "messages drained at a time", 1)
    file_buffer_events_per_file: int = _setting(
        "FILE_BUFFER_EVENTS_PER_FILE", 10_000, "messages after which the next file begins", 1
    )
    file_buffer_fsync: str = _setting(
        "FILE_BUFFER_FSYNC", "always", "when a file is forced to the disk: always before the answer, interval or never"
    )
    file_buffer_max_mb: int = _setting("FILE_BUFFER_MAX_MB", 0, "most that the spool may hold; 0: no bound", 0)
    file_buffer_sticky: bool = _setting(
        "FILE_BUFFER_STICKY", True, "a push goes behind what is still spooled of its partition"
    )

    warnings: tuple[str, ...] = ()

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Reads the environment; raises `SettingsError` with every unusable variable at once."""
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        errors: list[str] = []
        warnings: list[str] = []
        for spec in fields(cls):
            variable: Variable | None = spec.metadata.get("variable")
            if variable is None:
                continue
            try:
                values[spec.name] = _value(variable, spec.default, environ, warnings)
            except SettingsError as error:
                errors.append(str(error))
        warnings.extend(_jwt_warnings(values))
        if values.get("strict_boot"):
            errors.extend(warnings)
        if values.get("encryption_required", True):
            errors.extend(_key_errors(values["encryption_key"], values["encryption_keys_old"]))
        errors.extend(_bind_errors("QUEEN_BIND_ADDR", values.get("bind_addr", ""), "PORT"))
        if values["mesh_bind_addr"]:
            errors.extend(_bind_errors("QUEEN_MESH_BIND_ADDR", values["mesh_bind_addr"], "QUEEN_MESH_PORT"))
        errors.extend(_mesh_errors(values))
        errors.extend(_certificate_errors("PG_SSL_ROOT_CERT", values["pg_ssl_root_cert"]))
        errors.extend(_jwt_errors(values))
        errors.extend(_tenancy_errors(values))
        errors.extend(_fsync_errors(values["file_buffer_fsync"]))
        if errors:
            raise SettingsError("; ".join(errors))
        values["file_buffer_dir"] = values["file_buffer_dir"] or cls.__dataclass_fields__["file_buffer_dir"].default
        values["server_id"] = values["server_id"] or socket.gethostname() or uuid.uuid4().hex
        values["mesh_bind_addr"] = values["mesh_bind_addr"] or values["bind_addr"]
        values["subscription_mode"] = (
            "new" if values["subscription_mode"] in ("new", "new-only", "new_only", "newonly") else "all"
        )
        return cls(**values, warnings=tuple(warnings))

    def allowed_ids(self) -> list[str]:
        """The server ids that may connect to the mesh, this broker's own among them; none: any."""
        ids = _parts(self.mesh_allowed_ids)
        return [*ids, self.server_id] if ids else []

    def proxy_networks(self) -> list[str]:
        """The networks that may send the tenant header; none: everybody may."""
        return _parts(self.trusted_proxy_cidrs)


def _bind_errors(name: str, bind_addr: str, port: str) -> list[str]:
    host = bind_addr.strip()
    if host and (host.startswith("[") or host.count(":") != 1):
        return []
    return [f'{name}="{bind_addr}" must be a host without a port (the port is {port})']


def _mesh_errors(values: dict[str, Any]) -> Iterator[str]:
    """What would leave the mesh more open than was meant."""
    guard, allow = values["mesh_replay_guard"], values["mesh_allow"]
    if guard not in ("refuse", "log", "off"):
        yield f'QUEEN_MESH_REPLAY_GUARD="{guard}" must be refuse, log or off'
    if allow not in ("any", "peers"):
        try:
            networks = [ipaddress.ip_network(part.strip(), strict=False) for part in allow.split(",") if part.strip()]
        except ValueError as error:
            yield f'QUEEN_MESH_ALLOW="{allow}" must be any, peers or networks such as 10.1.0.0/16: {error}'
        else:
            if not networks:
                yield f'QUEEN_MESH_ALLOW="{allow}" names no network; write any, peers or networks'
    if values.get("mesh_strict") and not values["sync_secret"]:
        yield "QUEEN_MESH_STRICT=true needs QUEEN_SYNC_SECRET, which peers sign with; set it, the same on every broker"
    for name in ("mesh_allowed_ids", "mesh_names"):
        if values[name].strip() and not _parts(values[name]):
            yield f'QUEEN_{name.upper()}="{values[name]}" names nobody'
    files = {f"QUEEN_{name.upper()}": values[name] for name in ("mesh_tls_cert", "mesh_tls_key", "mesh_tls_ca")}
    if any(files.values()):
        yield from (f"{name} is not set: mutual TLS takes all three files" for name in files if not files[name])


def _certificate_errors(name: str, pem: str) -> Iterator[str]:
    if not pem:
        return
    from cryptography.x509 import load_pem_x509_certificates  # only for who has one: it takes a while to load

    try:
        load_pem_x509_certificates(pem.replace("\\n", "\n").encode())
    except ValueError as error:
        yield f"{name}: not certificates in PEM: {error}"


def _jwt_errors(values: dict[str, Any]) -> Iterator[str]:
    """What would leave a broker that asks for tokens without a way to check them."""
    algorithm = values["jwt_algorithm"]
    asymmetric = values["jwt_public_key"] or values["jwt_jwks_url"]
    if not values.get("jwt_enabled"):
        return
    start = "invalid JWT auth configuration:"
    names = (*JWT_ALGORITHMS, "auto")
    if algorithm not in names:
        yield f"{start} JWT_ALGORITHM={algorithm} is not supported (use {', '.join(names[:-1])} or {names[-1]})"
    elif algorithm.startswith("HS") and not values["jwt_secret"]:
        yield f"{start} JWT_ENABLED=true with JWT_ALGORITHM={algorithm} but no key material: set JWT_SECRET"
    elif algorithm == "auto" and not values["jwt_secret"] and not asymmetric:
        yield (
            f"{start} JWT_ENABLED=true with JWT_ALGORITHM=auto but no key material: "
            "set JWT_SECRET, JWT_PUBLIC_KEY or JWT_JWKS_URL"
        )
    elif not algorithm.startswith("HS") and algorithm != "auto" and not asymmetric:
        yield (
            f"{start} JWT_ENABLED=true with JWT_ALGORITHM={algorithm} "
            "but neither JWT_PUBLIC_KEY nor JWT_JWKS_URL is set"
        )
    if values["jwt_secret"].lstrip().startswith(("-----BEGIN", "ssh-")):
        yield f"{start} JWT_SECRET holds a PEM or SSH key; public keys go to JWT_PUBLIC_KEY"


def _jwt_warnings(values: dict[str, Any]) -> Iterator[str]:
    if values.get("jwt_enabled") and values["jwt_jwks_url"].lower().startswith("http://"):
        yield "JWT_JWKS_URL is plain http: whoever is on the way can put keys of their own there; use https"
    if values["jwt_tenant_claim"] and not values.get("jwt_enabled"):
        yield "JWT_TENANT_CLAIM has no effect without JWT_ENABLED"


def _tenancy_errors(values: dict[str, Any]) -> Iterator[str]:
    if values.get("tenancy_header") and not values.get("kv_trusted_proxy"):
        yield (
            "QUEEN_TENANCY_HEADER=1 without QUEEN_KV_TRUSTED_PROXY=1: whoever reaches the port could name any tenant. "
            "Let only a proxy that sets x-queen-tenant itself reach it, and say so with QUEEN_KV_TRUSTED_PROXY=1"
        )
    for text in _parts(values["trusted_proxy_cidrs"]):
        try:
            ipaddress.ip_network(text, strict=False)
        except ValueError as error:
            yield f"QUEEN_TRUSTED_PROXY_CIDRS must be networks such as 10.1.0.0/16: {error}"
    if values["trusted_proxy_cidrs"].strip() and not _parts(values["trusted_proxy_cidrs"]):
        yield f'QUEEN_TRUSTED_PROXY_CIDRS="{values["trusted_proxy_cidrs"]}" names no network'


def _parts(text: str) -> list[str]:
    return [part for word in text.split(",") if (part := word.strip())]


def is_key(text: str) -> bool:
    """Whether a text is a key: 64 hexadecimal digits."""
    return len(text) == KEY_DIGITS and _HEX.issuperset(text)


def _key_errors(key: str, old: str) -> Iterator[str]:
    """What is wrong with the keys; the value of a secret is not shown."""
    rule = f"is not {KEY_DIGITS} hexadecimal digits (QUEEN_ENCRYPTION_REQUIRED=false boots without encryption)"
    if key and not is_key(key):
        yield f"QUEEN_ENCRYPTION_KEY=<set:{len(key)} chars> {rule}"
    for number, text in enumerate(map(str.strip, old.split(",")), 1):
        if text and not is_key(text):
            yield f"QUEEN_ENCRYPTION_KEYS_OLD: key {number}, <set:{len(text)} chars>, {rule}"


def _fsync_errors(word: str) -> list[str]:
    if word in ("always", "interval", "never"):
        return []
    return [f'FILE_BUFFER_FSYNC="{word}" must be always, interval or never']


def _value(variable: Variable, default: Any, environ: Mapping[str, str], warnings: list[str]) -> Any:
    name, text = _first(variable, environ)
    if text is None:
        return default
    if variable.kind == "bool":
        return parse_boolean(name, text) if text.strip() else default
    if variable.kind == "str":
        return text
    parse: Callable[[str], float] = int if variable.kind == "int" else float
    number = _number(parse, text)
    if number is None:
        rest = variable.names[variable.names.index(name) + 1 :]
        if rest and any(environ.get(other) for other in rest):
            warnings.append(f'{name}="{text}" is not a number; using {rest[0]}')
            return _value(replace(variable, names=rest), default, environ, warnings)
        warnings.append(f'{name}="{text}" is not a number; using {default}')
        return default
    low = -math.inf if variable.minimum is None else variable.minimum
    high = math.inf if variable.maximum is None else variable.maximum
    if variable.clamp:
        return parse(str(low)) if number < low else parse(str(high)) if number > high else number
    if low <= number <= high:
        return number
    warnings.append(f'{name}="{text}" is not between {low:g} and {high:g}; using {default}')
    return default


def _number(parse: Callable[[str], float], text: str) -> float | None:
    """The number that a text spells in plain ASCII, or None. One beyond 64 bits is nobody's intention."""
    if not text.isascii() or "_" in text or text != text.strip():
        return None
    try:
        number = parse(text)
    except ValueError:
        return None
    return number if abs(number) < _BEYOND else None


def _first(variable: Variable, environ: Mapping[str, str]) -> tuple[str, str | None]:
    """The first name that is set. A name with a fallback counts only when it is not empty."""
    for name in variable.names:
        text = environ.get(name)
        if text is not None and (text or len(variable.names) == 1):
            return name, text
    return variable.names[0], None
