"""The JSON codec of everything but message payloads, which are never decoded (see `queen.api.push`).

simplejson with the compact separators; NaN and Infinity are refused in both directions, since they are
not JSON and other parsers stumble over them.
"""

from __future__ import annotations

from typing import Any

import simplejson

# simplejson passes over a byte order mark, even over one that was decoded as Latin-1.
_MARKS = ("\ufeff", "\xef\xbb\xbf")


class JsonError(ValueError):
    """The bytes are not UTF-8 or not JSON; the message says where."""


def _refuse(name: str) -> Any:
    raise JsonError(f"{name} is not a JSON value")


def loads(data: bytes) -> Any:
    """Decodes UTF-8 JSON; raises `JsonError`.

    An integer keeps its value whatever its size; a float beyond the range is infinite.
    """
    try:
        text = data.decode("utf-8")
        if text.startswith(_MARKS):
            raise JsonError("a byte order mark is no JSON")
        return simplejson.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise JsonError("nested too deeply") from None
    except ValueError as error:
        raise JsonError(str(error)) from None


def dumps(value: Any) -> bytes:
    """Encodes to compact UTF-8 JSON; a float that is not a number becomes null."""
    return simplejson.dumps(value, separators=(",", ":"), ignore_nan=True).encode("ascii")
