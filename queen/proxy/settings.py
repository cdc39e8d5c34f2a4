"""Every environment variable of the proxy: name, default, floor, read once at boot.

Only the literal ``true`` is true, an integer that can't be read means the default, and an optional variable
that is set to nothing is unset. What can't be served at all raises `SettingsError`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from queen.settings import SettingsError, Variable

DEFAULT_TENANT = "00000000-0000-0000-0000-000000000001"

_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----")
_KEY = re.compile("-----BEGIN (?:RSA |EC )?PRIVATE KEY-----")


def _setting(names: str, default: Any, about: str, minimum: float | None = None) -> Any:
    kind = type(default).__name__
    return field(default=default, metadata={"variable": Variable(tuple(names.split()), kind, about, minimum)})


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """The proxy's configuration in force. Field order is the order of the documentation."""

    # Listener and logging
    port: int = _setting("QUEEN_PROXY_PORT", 6711, "HTTP port, plain or TLS", 1)
    bind_addr: str = _setting("QUEEN_PROXY_BIND_ADDR", "0.0.0.0", "HTTP listen host, without a port")
    worker_threads: str = _setting("QUEEN_PROXY_WORKER_THREADS", "", "accepted and unused: greenlets need no number")
    tls_cert: str = _setting("QUEEN_PROXY_TLS_CERT", "", "path of the certificate chain in PEM; needs the key too")
    tls_key: str = _setting("QUEEN_PROXY_TLS_KEY", "", "path of the private key in PEM; needs the certificate too")
    log_level: str = _setting("RUST_LOG LOG_LEVEL", "info", "log filter, as in info,limits=debug")
    log_json: bool = _setting("QUEEN_LOG_JSON", False, "log one JSON object a line")

    # The proxy's database
    pxdb_host: str = _setting("PXDB_HOST", "", "host of the proxy's database; its presence turns the control plane on")
    pxdb_port: int = _setting("PXDB_PORT", 5432, "port; direct to PostgreSQL, never a transaction pooler", 1)
    pxdb_user: str = _setting("PXDB_USER", "postgres", "user")
    pxdb_password: str = _setting("PXDB_PASSWORD", "", "password")
    pxdb_db: str = _setting("PXDB_DB", "queen_proxy", "database; never that of the messages")
    pxdb_use_ssl: bool = _setting("PXDB_USE_SSL", False, "connect by TLS")
    pxdb_ssl_reject_unauthorized: bool = _setting("PXDB_SSL_REJECT_UNAUTHORIZED", True, "check the certificate's chain")
    pxdb_ssl_root_cert: str = _setting("PXDB_SSL_ROOT_CERT", "", "the CA's certificate itself, in PEM (not a path)")
    pxdb_pool_size: int = _setting("PXDB_POOL_SIZE", 16, "most connections, without the listener's", 1)
    pxdb_timeout_ms: int = _setting("PXDB_TIMEOUT_MS", 5000, "patience for connecting, the pool and a statement", 100)

    # The gateway
    enforce: bool = _setting("QUEEN_PROXY_ENFORCE", False, "refuse what is over a limit; false: only log it")
    tenant_header: bool = _setting("QUEEN_PROXY_TENANT_HEADER", True, "tell the broker the tenant")
    max_body_bytes: int = _setting("QUEEN_PROXY_MAX_BODY_BYTES", 16_777_216, "ceiling of a buffered request body", 1)
    max_batch_items: int = _setting("QUEEN_PROXY_MAX_BATCH_ITEMS", 10_000, "batch cap when the plan has none", 1)
    upstream_timeout_ms: int = _setting(
        "QUEEN_PROXY_UPSTREAM_TIMEOUT_MS", 35_000, "patience for an answer that is no long poll", 1
    )
    connect_timeout_ms: int = _setting(
        "QUEEN_PROXY_UPSTREAM_CONNECT_TIMEOUT_MS", 5000, "patience for connecting to one address of a broker", 1
    )
    longpoll_max_ms: int = _setting("QUEEN_PROXY_LONGPOLL_MAX_MS", 90_000, "longest wait of a long poll", 0)
    longpoll_margin_ms: int = _setting("QUEEN_PROXY_LONGPOLL_MARGIN_MS", 10_000, "added to a long poll's wait", 0)
    balance: str = _setting(
        "QUEEN_PROXY_BALANCE", "pinned", "pinned: one broker of the cell until it fails; spread: all of them in turn"
    )
    cell_max_parked: int = _setting("QUEEN_PROXY_CELL_MAX_PARKED", 5000, "long polls at a time, all clusters", 1)
    reconcile_ms: int = _setting("QUEEN_PROXY_RECONCILE_MS", 60_000, "how often queues and storage are looked at", 100)
    registry_persist_ms: int = _setting("QUEEN_PROXY_REGISTRY_PERSIST_MS", 1000, "how often new queues are noted", 100)
    stale_grace_ms: int = _setting(
        "QUEEN_PROXY_STALE_GRACE_MS", 600_000, "how long to go on by memory while the database is away; 0: not", 0
    )
    default_cluster: str = _setting(
        "QUEEN_PROXY_DEFAULT_CLUSTER", "", "cluster of a host that names none; laptops only"
    )
    shared_hosts: str = _setting("QUEEN_PROXY_SHARED_HOSTS", "", "hosts on which the credential names the cluster")

    # People
    jwt_secret: str = _setting("QUEEN_PROXY_JWT_SECRET", "", "signs sessions (HS256)")
    jwt_ed25519_pem: str = _setting("QUEEN_PROXY_JWT_ED25519_PEM", "", "private key in PEM; wins over the secret")
    jwt_ed25519_pub_pem: str = _setting("QUEEN_PROXY_JWT_ED25519_PUB_PEM", "", "public key; alone: verify only")
    jwt_iss: str = _setting("QUEEN_PROXY_JWT_ISS", "queen-proxy", "issuer of sessions, minted and required")
    jwt_ttl_s: int = _setting("QUEEN_PROXY_JWT_TTL_S", 86_400, "life of a session in seconds", 1)
    cookie_name: str = _setting("QUEEN_PROXY_COOKIE_NAME", "queen_session", "name of the session cookie")
    cookie_domain: str = _setting("QUEEN_PROXY_COOKIE_DOMAIN", "", "domain of the cookie; makes it Secure")
    public_url: str = _setting("QUEEN_PROXY_PUBLIC_URL", "", "base of the callbacks of Google and GitHub")
    auth_host: bool = _setting("QUEEN_PROXY_AUTH_HOST", False, "a host for sign-in only: it needs the public URL")
    trusted_proxies: str = _setting(
        "QUEEN_PROXY_TRUSTED_PROXIES", "", "addresses or CIDRs whose X-Forwarded-For names who tries to sign in"
    )
    operator_enabled: bool = _setting("QUEEN_PROXY_OPERATOR_ENABLED", False, "let operators in on this cell")
    revocation_strict: bool = _setting(
        "QUEEN_PROXY_REVOCATION_STRICT", False, "refuse sessions while the deny-list can't be read"
    )
    revocation_sweep_ms: int = _setting(
        "QUEEN_PROXY_REVOCATION_SWEEP_MS", 3_600_000, "how often expired sessions leave the deny-list; 0: never", 0
    )
    google_client_id: str = _setting("GOOGLE_CLIENT_ID", "", "with its secret: sign-in by Google")
    google_client_secret: str = _setting("GOOGLE_CLIENT_SECRET", "", "secret of it")
    google_allowed_domains: str = _setting("GOOGLE_ALLOWED_DOMAINS", "", "domains that may sign in; empty: all")
    github_client_id: str = _setting("GITHUB_CLIENT_ID", "", "with its secret: sign-in by GitHub")
    github_client_secret: str = _setting("GITHUB_CLIENT_SECRET", "", "secret of it")
    oauth_state_secret: str = _setting(
        "QUEEN_PROXY_OAUTH_STATE_SECRET", "", "signs the state of such a sign-in; default: the session secret"
    )
    autoprovision: bool = _setting("QUEEN_PROXY_AUTOPROVISION", False, "create a user at the first such sign-in")
    autoprovision_tenant: str = _setting("QUEEN_PROXY_AUTOPROVISION_TENANT", "", "slug of the tenant they come to")
    default_role: str = _setting("QUEEN_PROXY_DEFAULT_ROLE", "viewer", "their role on each cluster of it")

    # Usage
    meter_flush_ms: int = _setting("QUEEN_PROXY_METER_FLUSH_MS", 15_000, "how often counted usage is written", 100)
    spool_dir: str = _setting(
        "QUEEN_PROXY_SPOOL_DIR", "./queen-proxy-spool", "where usage waits while the database is away"
    )
    shutdown_drain_ms: int = _setting(
        "QUEEN_PROXY_SHUTDOWN_DRAIN_MS", 5000, "patience for the last writes at a stop", 0
    )
    rollup_ms: int = _setting("QUEEN_PROXY_ROLLUP_MS", 3_600_000, "how often minutes are summed to days", 1000)
    quota_warn_percent: int = _setting("QUEEN_PROXY_QUOTA_WARN_PERCENT", 80, "share of a monthly quota that warns", 1)
    usage_keep_days: int = _setting("QUEEN_PROXY_USAGE_KEEP_DAYS", 90, "days that minutes of usage are kept", 1)

    # Development without a database
    dev_insecure: bool = _setting(
        "QUEEN_PROXY_DEV_INSECURE", False, "let every request in; never where others reach it"
    )
    dev_cell_url: str = _setting("QUEEN_PROXY_DEV_CELL_URL", "", "one broker for every host, without a database")
    dev_cell_token: str = _setting("QUEEN_PROXY_DEV_CELL_TOKEN", "", "bearer token for it")
    dev_tenant: str = _setting("QUEEN_PROXY_DEV_TENANT", DEFAULT_TENANT, "tenant of it")

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> ProxySettings:
        """Reads the environment; raises `SettingsError` that names what can't be served."""
        environ = os.environ if environ is None else environ
        values = {
            spec.name: _value(variable, spec.default, environ)
            for spec in fields(cls)
            if (variable := spec.metadata.get("variable"))
        }
        settings = cls(**values)
        errors = list(settings._errors())
        if errors:
            raise SettingsError("; ".join(errors))
        return settings

    def _errors(self) -> list[str]:
        errors = [*_bind_errors(self.bind_addr), *_tls_errors(self.tls_cert, self.tls_key)]
        if not self.pxdb_host and not self.dev_cell_url:
            errors.append("nothing to serve: set PXDB_HOST (or QUEEN_PROXY_DEV_CELL_URL)")
        if self.shared_hosts and not self.pxdb_host:
            errors.append(
                f'QUEEN_PROXY_SHARED_HOSTS="{self.shared_hosts}" needs PXDB_HOST: there are no keys without it'
            )
        if self.balance not in ("pinned", "spread"):
            errors.append(f'QUEEN_PROXY_BALANCE="{self.balance}" must be pinned or spread')
        if self.pxdb_ssl_root_cert and not _CERTIFICATE.search(self.pxdb_ssl_root_cert):
            errors.append("PXDB_SSL_ROOT_CERT holds no PEM certificate (its content is wanted, not a path)")
        return errors

    @property
    def shared(self) -> frozenset[str]:
        """The shared hosts as a request's host is compared with them."""
        return frozenset(host for part in self.shared_hosts.split(",") if (host := normal_host(part)))


def normal_host(text: str) -> str:
    """A host as it is compared: without port and trailing dots, in lower case."""
    return re.sub(r":\d+$", "", text.strip()).rstrip(".").lower()


def _value(variable: Variable, default: Any, environ: Mapping[str, str]) -> Any:
    text = next((text for name in variable.names if (text := environ.get(name))), None)
    # A bind address that is set to nothing is a mistake, where others are unset.
    if variable.names[0] == "QUEEN_PROXY_BIND_ADDR" and "QUEEN_PROXY_BIND_ADDR" in environ:
        return environ["QUEEN_PROXY_BIND_ADDR"]
    if text is None:
        return default
    if variable.kind == "bool":
        return text == "true"
    if variable.kind == "str":
        return text.replace("\\n", "\n") if "-----BEGIN" in text else text
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        return default
    return int(text) if variable.minimum is None else max(int(text), int(variable.minimum))


def _bind_errors(bind_addr: str) -> list[str]:
    host = bind_addr.strip()
    bare = host.startswith("[") and host.endswith("]") if "[" in host else host.count(":") != 1
    if host and bare:
        return []
    return [f'QUEEN_PROXY_BIND_ADDR="{bind_addr}" must be a host without a port (the port is QUEEN_PROXY_PORT)']


def _tls_errors(cert: str, key: str) -> list[str]:
    if bool(cert) != bool(key):
        there, missing = ("CERT", "KEY") if cert else ("KEY", "CERT")
        return [f"QUEEN_PROXY_TLS_{there} set without QUEEN_PROXY_TLS_{missing}"]
    errors = []
    for name, path, pattern in (("CERT", cert, _CERTIFICATE), ("KEY", key, _KEY)):
        if not path:
            continue
        try:
            if not pattern.search(Path(path).read_text("utf-8", "replace")):
                errors.append(f'QUEEN_PROXY_TLS_{name}="{path}" holds no such PEM block')
        except OSError as error:
            errors.append(f'QUEEN_PROXY_TLS_{name}="{path}": {error.strerror}')
    return errors
