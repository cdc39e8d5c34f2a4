"""Decoding of data-plane bodies: typed, in C, and with payloads left as the bytes that were sent.

Decoding payloads and encoding them again would change number spellings, key order and escapes, and costs
twenty times as much. msgspec leaves them raw but judges them by its own rules in one point: it refuses an
unpaired surrogate escape, which is legal JSON; such bodies are decoded with the escape masked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from queen.api.answers import Refusal

Body = TypeVar("Body")

MAX_ID_BYTES = 65_535
MAX_NAME = 255

_CONTROL = re.compile(r"[\x00-\x1f]")
# Every escape of a JSON text in turn: a surrogate pair, an unpaired surrogate (group 1), any other.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)

_PRIVATE_ESCAPE = re.compile(rb"\\u([eEfF][0-9a-fA-F]{3})")
_PRIVATE = re.compile(rb"\xee[\x80-\xbf]{2}|\xef[\x80-\xa3][\x80-\xbf]")


class Masks:
    """Escapes that stand for a body's unpaired surrogates while it is decoded.

    A mask is an escape of the same length, of a private-use character that the body doesn't contain, so
    taking it back restores the bytes exactly.
    """

    def __init__(self, body: bytes) -> None:
        self._masks: dict[bytes, bytes] = {}
        self._free = _unused(body)
        self.text = ""
        self.masked = _ESCAPE.sub(self._mask, body)

    def _mask(self, match: re.Match[bytes]) -> bytes:
        escape = match.group()
        if match.group(1) is None:
            return escape
        mask = self._masks.get(escape)
        if mask is None:
            code = next(self._free, None)
            if code is None:
                raise Refusal(400, "bad body: too many different unpaired surrogates")
            mask = self._masks[escape] = b"\\u%04x" % code
            self.text += chr(code)
        return mask

    def restore(self, payload: bytes) -> bytes:
        """The bytes as they were sent."""
        for escape, mask in self._masks.items():
            payload = payload.replace(mask, escape)
        return payload

    def readable(self, text: str) -> str:
        """A decoded text with the replacement character for each unpaired surrogate."""
        return text.translate(dict.fromkeys(map(ord, self.text), "\ufffd"))


def _unused(body: bytes) -> Iterator[int]:
    """The private-use characters that a body contains neither as an escape nor in UTF-8."""
    used = {int(digits, 16) for digits in _PRIVATE_ESCAPE.findall(body)}
    used.update(ord(character.decode()) for character in _PRIVATE.findall(body))
    return (code for code in range(0xE000, 0xF900) if code not in used)


class Decoder(Generic[Body]):
    """Decodes bodies to one type. Raises a 400 `Refusal` that begins with ``bad body:``."""

    def __init__(self, kind: type[Body]) -> None:
        self._decoder = msgspec.json.Decoder(kind)

    def decode(self, body: bytes) -> tuple[Body, Masks | None]:
        """The decoded body, and the masks to take back from its payloads (None almost always)."""
        try:
            if not body.isascii():
                body.decode("utf-8")  # raw payloads are not checked by the decoder
            return self._decoder.decode(body), None
        except RecursionError:
            raise Refusal(400, "bad body: nested too deeply") from None
        except msgspec.ValidationError as error:
            raise Refusal(400, f"bad body: {error}") from None
        except UnicodeDecodeError as error:
            raise Refusal(400, f"bad body: not UTF-8 at byte {error.start}") from None
        except msgspec.DecodeError as error:
            masks = Masks(body)
            if not masks.text:
                raise Refusal(400, f"bad body: {error}") from None
        try:
            return self._decoder.decode(masks.masked), masks
        except (RecursionError, msgspec.DecodeError) as error:
            raise Refusal(400, f"bad body: {error}") from None


def check_names(masks: Masks | None, *names: str | None) -> None:
    """Refuses a control character or an unpaired surrogate in queue, partition or transaction id."""
    for name in names:
        if name is not None and _CONTROL.search(name):
            raise Refusal(
                400,
                f"bad body: control characters are not allowed in queue, partition or transactionId: {name[:80]!r}",
            )
    check_surrogates(masks, *names)


def check_surrogates(masks: Masks | None, *texts: str | None) -> None:
    """Refuses an unpaired surrogate in a text that must match another one."""
    if masks is not None and any(mark in text for text in texts if text for mark in masks.text):
        raise Refusal(400, "bad body: unpaired surrogate in a name or id")


def check_item(position: int, queue: str, partition: str | None) -> None:
    """Refuses names that no row could hold; ``position`` is the item's in the request."""
    if not queue:
        raise Refusal(400, f"bad body: queue of item {position} is empty")
    if len(queue) > MAX_NAME:
        raise Refusal(400, f"bad body: queue of item {position} exceeds {MAX_NAME} characters")
    if partition is not None and len(partition) > MAX_NAME:
        raise Refusal(400, f"bad body: partition of item {position} exceeds {MAX_NAME} characters")


def check_id(position: int, transaction_id: str | None) -> None:
    """Refuses a transaction id that no frame could hold."""
    if transaction_id is None or len(transaction_id) * 4 <= MAX_ID_BYTES:
        return
    if len(transaction_id.encode()) > MAX_ID_BYTES:
        raise Refusal(400, f"bad body: transactionId of item {position} exceeds the {MAX_ID_BYTES}-byte limit")


def check_group(group: str) -> None:
    """Refuses a consumer group that no row could hold."""
    if len(group) > MAX_NAME:
        raise Refusal(400, f"consumerGroup exceeds {MAX_NAME} characters")
    if _CONTROL.search(group):
        raise Refusal(400, f"control characters are not allowed in consumerGroup: {group[:80]!r}")
