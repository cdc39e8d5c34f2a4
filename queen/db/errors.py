"""What the database layer raises, in the terms of its callers."""

from __future__ import annotations

# Connections, deadlocks, locks, a server that only reads, resources, an operator at work, the system, a schema
# or rights that are being changed, internal errors, authentication.
_TRANSIENT = ("08", "40001", "40P01", "55P03", "25006", "53", "57", "58", "0A", "3F", "42", "XX", "28", "3D")


QUERY_CANCELED = "57014"


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
    def away(self) -> bool:
        """Whether the server is going, coming or only answering reads: no fault of the statement."""
        return self.sqlstate.startswith(("08", "57P")) or self.sqlstate in ("25006", "53300")

    @property
    def transient(self) -> bool:
        """Whether the same statement may well succeed later."""
        return self.lost or self.raced_with_delete or self.sqlstate.startswith(_TRANSIENT)

    @property
    def raced_with_delete(self) -> bool:
        """Whether a queue or partition was deleted under the statement: trying again makes it anew."""
        return self.sqlstate in ("23503", "QP001")


class ConnectionLost(StatementFailed):
    """The connection broke or the statement was cancelled on the way: its outcome is unknown."""

    lost = True

    @property
    def away(self) -> bool:
        """Whether the connection broke, and not only the patience with a slow statement."""
        return self.sqlstate != QUERY_CANCELED
