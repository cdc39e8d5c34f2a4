"""The ``config:`` lines of the boot log: every setting in force, in blocks, with secrets masked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from queen.db import tls
from queen.settings import Settings, Variable

# The setting that begins a block; those behind it belong to it, up to the next.
_BLOCKS = {
    "port": "server",
    "log_level": "logging",
    "server_id": "server",
    "pg_host": "postgres",
    "pool_size": "server",
    "apply_schema": "jobs",
    "pop_timeout_ms": "flow",
    "zstd_level": "engine",
    "sync_enabled": "sync",
    "run_dir": "server",
    "retention_interval_ms": "jobs",
    "jwt_enabled": "auth",
    "tenancy_header": "security",
    "encryption_key": "security",
    "file_buffer_dir": "file_buffer",
}
# Names that operators know, where they are not the setting's own.
_KEYS = {
    "bind_addr": "addr",
    "pool_size": "pool",
    "statement_timeout_ms": "stmt_timeout_ms",
    "pg_host": "host",
    "pg_port": "port",
    "pg_user": "user",
    "pg_password": "password",
    "pg_database": "database",
    "pg_use_ssl": "use_ssl",
    "pg_ssl_reject_unauthorized": "ssl_reject_unauthorized",
    "pg_ssl_root_cert": "ssl_root_cert",
    "log_level": "level",
    "log_json": "json",
    "sync_enabled": "enabled",
    "mesh_peers": "peers",
    "sync_secret": "secret",
    "sync_secret_previous": "secret_previous",
    "sync_heartbeat_ms": "heartbeat_ms",
    "sync_dead_threshold_ms": "dead_threshold_ms",
    "jwt_enabled": "enabled",
    "jwt_algorithm": "algorithm",
    "jwt_secret": "secret",
    "jwt_public_key": "public_key",
    "jwt_jwks_url": "jwks_url",
    "jwt_issuer": "issuer",
    "jwt_audience": "audience",
    "jwt_clock_skew": "clock_skew_s",
    "jwt_skip_paths": "skip_paths",
    "file_buffer_dir": "dir",
    "file_buffer_flush_ms": "flush_interval_ms",
    "file_buffer_max_batch": "max_batch_size",
    "file_buffer_events_per_file": "max_events_per_file",
    "file_buffer_fsync": "fsync",
    "file_buffer_max_mb": "max_mb",
    "file_buffer_sticky": "sticky",
}


def blocks(settings: Settings, **more: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and values of each block. ``more`` joins the block ``server``, or replaces what is in it."""
    found: dict[str, dict[str, Any]] = {}
    block = ""
    for spec in fields(settings):
        variable: Variable | None = spec.metadata.get("variable")
        if variable is None:
            continue
        block = _BLOCKS.get(spec.name, block)
        value = getattr(settings, spec.name)
        key = _KEYS.get(spec.name, spec.name)
        found.setdefault(block, {})[key] = masked(value) if variable.secret else value
    found["server"].update(more)
    found["postgres"]["ssl_root_cert"] = tls.label(settings)  # who is trusted, rather than a page of PEM
    if "sync" in found:
        found["sync"]["auth"] = "hmac" if settings.sync_secret else "off"
    yield from found.items()


def gunicorn(settings: Any) -> dict[str, Any]:
    """What is in force of gunicorn's own settings, of which the application can change none."""
    return {
        "bind": ",".join(map(str, settings.bind)) if isinstance(settings.bind, list) else settings.bind,
        "workers": settings.workers,
        "keepalive_s": settings.keepalive,
        "worker_connections": settings.worker_connections,
        "timeout_s": settings.timeout,
        "graceful_timeout_s": settings.graceful_timeout,
    }


def masked(secret: str) -> str:
    """How a log line shows a secret."""
    return f"<set:{len(secret)} chars>" if secret else "<unset>"
