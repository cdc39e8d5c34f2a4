"""How the bodies of requests come in: bounded in size, in sum and in time.

A body is read in pieces, and only what was asked of the connection counts: a client that announces much and
sends little takes little. The first piece of each is free, so the small requests of the many go on while
large ones fill the room.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import gevent
from gunicorn.http.errors import NoMoreData, ParseException

from queen.api.answers import Refusal
from queen.engine.waiting import ClientGone
from queen.log import Log

log = Log("http")

Environ = dict[str, Any]

_FREE = 16 << 10
_MOST = 1 << 20  # in one piece
_LOOK_SECONDS = 1.0


class Connection(Protocol):
    """What is needed of a client's socket."""

    def fileno(self) -> int: ...


class Receiving:
    """The bodies that are being received in one worker.

    ``limit`` and ``room`` are bytes: of one body, and of all together. A body that takes longer than
    ``seconds`` is given up.
    """

    def __init__(self, limit: int, room: int, seconds: float) -> None:
        self._limit = limit
        self._room = max(room, limit + _MOST)
        self._seconds = seconds
        self._taken = 0
        self._started: dict[int, float] = {}
        self._late: set[int] = set()

    def body(self, environ: Environ) -> bytes:
        """All bytes of a request's body.

        Raises a `Refusal`: 413 as soon as it is known to pass the cap, 400 for malformed chunks, 503 when
        there is no room, 408 when it takes too long; and `ClientGone` when it ends early.
        """
        text = environ.get("CONTENT_LENGTH")
        if not text and "HTTP_TRANSFER_ENCODING" not in environ:
            return b""
        length = int(text) if text else -1
        if length > self._limit:
            raise Refusal(413, "request body too large", unread=True)
        client: Connection | None = environ.get("gunicorn.socket")
        number = -1 if client is None else client.fileno()
        self._started[number] = time.monotonic()
        try:
            return self._read(environ["wsgi.input"], length)
        except NoMoreData:
            raise self._gone(number) from None
        except ClientGone:
            raise self._gone(number) from None
        except OSError as error:
            if error.errno is not None:
                raise self._gone(number) from None
            raise Refusal(400, f"bad body: {error}", unread=True) from None
        except ParseException as error:
            raise Refusal(400, f"bad body: {error}", unread=True) from None
        finally:
            self._started.pop(number, None)
            self._late.discard(number)

    def _read(self, stream: Any, length: int) -> bytes:
        """Reads to the length, or to the end of the chunks when it is -1."""
        parts: list[bytes] = []
        size = taken = 0
        piece = _FREE
        try:
            while size != length:
                part = stream.read(piece if length < 0 else min(piece, length - size))
                if not part:
                    break
                parts.append(part)
                size += len(part)
                if size > self._limit:
                    raise Refusal(413, "request body too large", unread=True)
                if size != length:
                    # As much again as came so far: what is taken grows with what was sent.
                    piece = min(max(size, _FREE), _MOST)
                    if self._taken + piece > self._room:
                        log.sampled(10, "no room for request bodies", taken_kb=self._taken >> 10)
                        raise Refusal(503, "too many large requests are being received; try again", unread=True)
                    taken += piece
                    self._taken += piece
        finally:
            self._taken -= taken
        if size < length:
            raise ClientGone
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _gone(self, number: int) -> Exception:
        if number in self._late:
            return Refusal(408, "the request body did not come in time", unread=True)
        return ClientGone()

    def watch(self, end: Callable[[int], None]) -> None:
        """Has ``end`` called with the file number of each connection whose body is late. Never returns."""
        while True:
            gevent.sleep(_LOOK_SECONDS)
            oldest = time.monotonic() - self._seconds
            for number, started in list(self._started.items()):
                if started < oldest and number not in self._late:
                    self._late.add(number)
                    end(number)
