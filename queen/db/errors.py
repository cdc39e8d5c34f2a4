"""What the database layer raises, in the terms of its callers."""

from __future__ import annotations


class Unavailable(Exception):
    """No connection could be had in time: PostgreSQL is away, or every connection is busy."""


class StatementFailed(Exception):
    """PostgreSQL refused a statement. The text is the server's primary message and nothing else."""

    lost = False

    def __init__(self, message: str, sqlstate: str = "", detail: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.sqlstate = sqlstate
        self.detail = detail

    @property
    def raced_with_delete(self) -> bool:
        """Whether a queue or partition was deleted under the statement: trying again makes it anew."""
        return self.sqlstate in ("23503", "QP001")


class ConnectionLost(StatementFailed):
    """The connection broke or the statement was cancelled on the way: its outcome is unknown."""

    lost = True
