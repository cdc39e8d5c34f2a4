"""Requests as the broker's views see them.

The data plane answers thousands of requests a second, so a view takes a thin `Request` over the WSGI
environment and returns an `Answer` (see `queen.api.answers`); Flask's request and response objects stay out of it.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote_plus, unquote_to_bytes

from queen import codec
from queen.api.answers import Answer, Refusal

if TYPE_CHECKING:
    from queen.api.receiving import Receiving
    from queen.auth.access import Caller
    from queen.auth.levels import Demand
    from queen.engine.engine import Engine
    from queen.spool.spool import Spool

Environ = dict[str, Any]

_INT32 = re.compile(r"[+-]?[0-9]+")


class Request:
    """One HTTP request: the WSGI environment, the tenant it acts for and who sent it.

    ``query`` is the raw query string. ``tenant`` is the tenant's UUID in 16 bytes, ``subject`` the
    authenticated producer or None.
    """

    __slots__ = ("_receiving", "engine", "environ", "query", "spool", "subject", "tenant")

    def __init__(
        self,
        environ: Environ,
        query: str,
        engine: Engine,
        spool: Spool,
        tenant: bytes,
        receiving: Receiving,
        subject: bytes | None = None,
    ) -> None:
        self.environ = environ
        self.query = query
        self.engine = engine
        self.spool = spool
        self.tenant = tenant
        self.subject = subject
        self._receiving = receiving

    def body(self) -> bytes:
        """The body's bytes, all of them; raises what `Receiving.body` raises."""
        return self._receiving.body(self.environ)

    def json(self) -> Any:
        """The body decoded by the general codec; raises a 400 `Refusal`."""
        try:
            return codec.loads(self.body())
        except codec.JsonError as error:
            raise Refusal(400, f"bad body: {error}") from None

    def parameters(self) -> dict[str, str]:
        """The query parameters. Raises a 400 `Refusal` for one that is repeated or is not UTF-8."""
        return dict(parse_query(self.query))


class Host(Protocol):
    """What the application needs of the worker it runs in.

    ``guarded`` tells that callers must say who they are. ``idle`` holds the connections that may bring a request,
    their first or another, by file number; those that were closed meanwhile stay until the number is used again.
    """

    stopping: bool
    guarded: bool
    idle: dict[int, socket.socket]

    def admit(self, environ: Environ, path: str, demand: Demand) -> Caller | None:
        """Lets a request pass and says whose it is, None when nobody asks; raises `queen.auth.denied.Denied`."""

    def request(self, environ: Environ, query: str, caller: Caller | None = None) -> Request:
        """Binds a request to the engine and its tenant; raises a 503 `Refusal` while the engine starts, and
        `queen.auth.denied.Denied` for a tenant that can't be."""


@lru_cache(maxsize=4096)
def parse_query(query: str) -> tuple[tuple[str, str], ...]:
    """Name and value of each parameter, decoded. Cached: consumers repeat theirs."""
    seen: dict[str, str] = {}
    for part in query.split("&"):
        if not part:
            continue
        name, _, value = part.partition("=")
        try:
            key = unquote_plus(name, errors="strict")
            text = unquote_plus(value, errors="strict")
        except UnicodeDecodeError:
            raise Refusal(400, f"query parameter {name[:80]!r} is not UTF-8") from None
        if key in seen:
            raise Refusal(400, f"query parameter {key[:80]!r} is given twice")
        seen[key] = text
    return tuple(seen.items())


def strict_boolean(parameters: dict[str, str], name: str, default: bool) -> bool:
    """``true`` or ``false`` exactly; anything else is a 400 `Refusal`."""
    text = parameters.get(name)
    if text is None:
        return default
    if text in ("true", "false"):
        return text == "true"
    raise Refusal(400, f"query parameter {name}={text[:80]!r} must be true or false")


def strict_integer(parameters: dict[str, str], name: str, default: int, bits: int = 31, low: int | None = None) -> int:
    """A plain decimal in the width given; anything else is a 400 `Refusal`."""
    text = parameters.get(name)
    if text is None:
        return default
    if len(text) <= 21 and _INT32.fullmatch(text):
        number = int(text)
        if (-(1 << bits) if low is None else low) <= number < 1 << bits:
            return number
    raise Refusal(400, f"query parameter {name}={text[:80]!r} is not an integer in range")


def lenient_integer(parameters: dict[str, str], name: str, default: int) -> int:
    """A 32-bit decimal, else the default: the rule of the administrative routes."""
    text = parameters.get(name, "")
    if len(text) <= 11 and _INT32.fullmatch(text) and -(1 << 31) <= int(text) < 1 << 31:
        return int(text)
    return default


def lenient_boolean(parameters: dict[str, str], name: str, default: bool) -> bool:
    """``true/1/yes`` or ``false/0/no``, else the default: the rule of the administrative routes."""
    word = parameters.get(name, "").lower()
    if word in ("true", "1", "yes"):
        return True
    return default if word not in ("false", "0", "no") else False


def decode_segment(segment: str) -> str:
    """One percent-encoded path segment as text; raises a 400 `Refusal` when it is not UTF-8."""
    if "%" not in segment and segment.isascii():
        return segment
    try:
        return unquote_to_bytes(segment.encode("latin-1")).decode("utf-8")
    except (UnicodeDecodeError, UnicodeEncodeError):
        raise Refusal(400, f"path segment {segment[:80]!r} is not UTF-8") from None


def direct(view: Callable[..., Answer]) -> Callable[..., Any]:
    """Marks a view that takes a `Request` and returns an `Answer`: it runs without Flask's context."""
    view.direct = True  # type: ignore[attr-defined]
    return view


def no_head(view: Callable[..., Answer]) -> Callable[..., Answer]:
    """Marks a GET view with effects: a HEAD on it would lease a batch and drop it, so it is a 405."""
    view.no_head = True  # type: ignore[attr-defined]
    return view
