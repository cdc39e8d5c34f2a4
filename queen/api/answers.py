"""What a view answers: ready bytes, or an error that ends the request."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from queen import codec


class Answer:
    """A response: status code, body, and headers beyond the content type and length."""

    __slots__ = ("body", "content_type", "headers", "status")

    def __init__(
        self,
        status: int,
        body: bytes = b"",
        headers: tuple[tuple[str, str], ...] = (),
        content_type: str = "application/json",
    ) -> None:
        self.status = status
        self.body = body
        self.headers = headers
        self.content_type = content_type

    @property
    def status_line(self) -> str:
        return f"{self.status} {HTTPStatus(self.status).phrase}"


NO_CONTENT = Answer(204)


def json_answer(value: Any, status: int = 200) -> Answer:
    return Answer(status, codec.dumps(value))


class Refusal(Exception):
    """Ends a request with an error; ``body`` is encoded as JSON, a text becomes ``{"error": text}``.

    ``unread`` tells that the request's own body was not read to its end: the connection ends with it.
    """

    def __init__(self, status: int, body: str | dict[str, Any], unread: bool = False) -> None:
        super().__init__(body)
        self.status = status
        self.body = {"error": body} if isinstance(body, str) else body
        self.unread = unread

    def answer(self) -> Answer:
        headers = (("Retry-After", "1"),) if self.status == 503 else ()
        return Answer(self.status, codec.dumps(self.body), headers)
