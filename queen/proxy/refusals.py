"""The answers that the proxy gives by itself. Their codes are what programs read; the texts appear in logs."""

from __future__ import annotations

from http import HTTPStatus

from queen import codec


class Refusal(Exception):
    """Ends a request with an error: status, machine-readable code, text for people, seconds to wait."""

    def __init__(self, status: int, code: str, text: str, retry_after: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.text = text
        self.retry_after = retry_after

    @property
    def status_line(self) -> str:
        return f"{self.status} {HTTPStatus(self.status).phrase}"

    @property
    def body(self) -> bytes:
        return codec.dumps({"code": self.code, "error": self.text})


def unauthorized(text: str) -> Refusal:
    return Refusal(401, "unauthorized", text)


def forbidden(text: str) -> Refusal:
    return Refusal(403, "forbidden", text)


def cluster_unknown() -> Refusal:
    """401 like a missing credential, not 421: either header missing is answered alike."""
    return Refusal(401, "cluster_unknown", "no cluster for this host")


def cluster_suspended() -> Refusal:
    return Refusal(403, "cluster_suspended", "cluster suspended")


def route_blocked() -> Refusal:
    return Refusal(404, "route_blocked", "not available")


def too_large(text: str) -> Refusal:
    return Refusal(413, "payload_too_large", text)


def rate_limited(text: str, seconds: int) -> Refusal:
    return Refusal(429, "rate_limited", text, seconds)


def quota_exceeded(text: str) -> Refusal:
    return Refusal(403, "quota_exceeded", text)


def bad_gateway(text: str) -> Refusal:
    return Refusal(502, "bad_gateway", text)
