"""How a request is turned away before anything of it is read."""

from __future__ import annotations


class Denied(Exception):
    """Ends a request with a status and an error text; the text never quotes what the client sent."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
