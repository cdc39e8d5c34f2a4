"""Headers on their way to the broker and back: what is taken off, what is put on, what stays.

The broker believes the tenant header, so a client's own never gets past here, in whatever spelling.
"""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

from queen.proxy.clusters import Cluster
from queen.proxy.upstream import Reply

TENANT_HEADER = "x-queen-tenant"
REQUEST_ID_HEADER = "x-queen-request-id"

# As WSGI names them, where "-" and "_" are the same. Expect was answered by our own server.
_TAKEN_OFF = frozenset(
    {
        "HTTP_AUTHORIZATION",
        "HTTP_X_QUEEN_TENANT",
        "HTTP_X_QUEEN_REQUEST_ID",
        "HTTP_X_QUEEN_ACT_CLUSTER",
        "HTTP_X_QUEEN_ROLE",
        "HTTP_HOST",
        "HTTP_CONNECTION",
        "HTTP_PROXY_CONNECTION",
        "HTTP_KEEP_ALIVE",
        "HTTP_TE",
        "HTTP_TRAILER",
        "HTTP_TRANSFER_ENCODING",
        "HTTP_UPGRADE",
        "HTTP_EXPECT",
        "HTTP_COOKIE",
        "HTTP_X_FORWARDED_FOR",
        "HTTP_CONTENT_LENGTH",
        "HTTP_CONTENT_TYPE",
    }
)
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"proxy-connection",
        b"keep-alive",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-queen-request-id",
    }
)


def request_id() -> str:
    """13 hex characters, the front of a UUID of version 7: milliseconds since 1970, and the version."""
    return f"{int(time.time() * 1000):012x}7"


def request_head(
    environ: dict[str, Any],
    target: str,
    cluster: Cluster,
    authority: str,
    rid: str,
    length: int | None,
    tenant_header: bool,
    cookie_name: str,
    extra: tuple[tuple[str, str], ...] = (),
) -> bytes:
    """The head of a request for the broker. ``length`` is its body's, None for one in chunks."""
    lines = [f"{environ['REQUEST_METHOD']} {target} HTTP/1.1\r\nHost: {authority}\r\n{REQUEST_ID_HEADER}: {rid}\r\n"]
    if cluster.cell_secret:
        lines.append(f"Authorization: Bearer {cluster.cell_secret}\r\n")
    if tenant_header:
        lines.append(f"{TENANT_HEADER}: {cluster.broker_tenant}\r\n")
    named = _named(environ.get("HTTP_CONNECTION", ""))
    for key, value in environ.items():
        if key.startswith("HTTP_") and key not in _TAKEN_OFF and key not in named:
            lines.append(f"{_spelling(key)}: {value}\r\n")
    if content_type := environ.get("CONTENT_TYPE"):
        lines.append(f"Content-Type: {content_type}\r\n")
    if cookie := _without(environ.get("HTTP_COOKIE", ""), cookie_name):
        lines.append(f"Cookie: {cookie}\r\n")
    peers = [text for text in (environ.get("HTTP_X_FORWARDED_FOR"), environ.get("REMOTE_ADDR")) if text]
    if peers:
        lines.append(f"X-Forwarded-For: {', '.join(peers)}\r\n")
    lines += [f"{name}: {value}\r\n" for name, value in extra]
    if length is None:
        lines.append("Transfer-Encoding: chunked\r\n")
    elif length or environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
        lines.append(f"Content-Length: {length}\r\n")
    lines.append("\r\n")
    return "".join(lines).encode("latin-1")


def answer_head(reply: Reply, rid: str, length: int | None) -> bytes:
    """The head of an answer for the client, without what concerns the connection to it.

    ``length`` is that of a body that was read whole; None keeps what the broker said.
    """
    lines = [b"HTTP/1.1 %d %s\r\n" % (reply.status, reply.reason)]
    named: set[bytes] = set()
    if connection := reply.header(b"connection"):
        named = {name.strip().lower() for name in connection.split(b",")}
    for name, value in reply.headers:
        lower = name.lower()
        if lower in _HOP_BY_HOP or lower in named or (length is not None and lower == b"content-length"):
            continue
        lines.append(b"%s: %s\r\n" % (name, value))
    if length is not None and reply.status not in (204, 304):
        lines.append(b"Content-Length: %d\r\n" % length)
    lines.append(f"{REQUEST_ID_HEADER}: {rid}\r\n".encode())
    return b"".join(lines)


@lru_cache(maxsize=1024)
def _spelling(key: str) -> str:
    return key[5:].replace("_", "-").title()


@lru_cache(maxsize=256)
def _named(header: str) -> frozenset[str]:
    """What a Connection header names, as WSGI names it."""
    names = {name.strip().upper().replace("-", "_") for name in header.split(",")}
    return frozenset(f"HTTP_{name}" for name in names if name)


def _without(header: str, cookie: str) -> str:
    """A Cookie header without one cookie."""
    if cookie not in header:
        return header
    parts = [part.strip() for part in header.split(";")]
    return "; ".join(part for part in parts if part and part.partition("=")[0].strip() != cookie)
