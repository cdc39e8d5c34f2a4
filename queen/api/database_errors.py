"""What a client is told when the database fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from queen.api.answers import Refusal
from queen.db.errors import Unavailable
from queen.log import Log

log = Log("db")


@contextmanager
def database_errors(prefix: str) -> Iterator[None]:
    """Turns database errors into refusals; for a ``with`` block, or as the decorator of a view.

    Without a connection: 500 ``pool``. A value that PostgreSQL can't use: 400, since sending it again
    is no remedy. Anything else: 500. The text is the prefix and the server's primary message, never the
    statement, its context or the detail.
    """
    try:
        yield
    except Unavailable:
        raise Refusal(500, "pool") from None
    except UnicodeEncodeError:
        raise Refusal(400, f"{prefix}text is not valid Unicode") from None
    except psycopg.DataError as error:
        raise Refusal(400, prefix + _primary(error)) from None
    except psycopg.Error as error:
        log.sampled(10, "administrative statement failed", error=_primary(error), sqlstate=error.sqlstate)
        raise Refusal(500, prefix + _primary(error)) from None


def _primary(error: psycopg.Error) -> str:
    """The server's primary message; for an error of the client library, the first line of its own."""
    return error.diag.message_primary or str(error).partition("\n")[0] or "database error"
