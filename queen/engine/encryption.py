"""Encryption at rest: the envelope that payloads of encrypted queues are stored in, and which queues those are.

A payload is sealed with AES-256-GCM and stored as a JSON object in its place. Reading goes by shape: what
looks like an envelope and opens with one of the keys is handed out as it was sent, whatever the queue's
flag says by now; anything else as it is stored. Whether a queue is encrypted is judged in SQL with every
write; what is remembered here only spares the second attempt.
"""

from __future__ import annotations

import os
from base64 import b64decode, b64encode
from binascii import Error as BadBase64

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from gevent.hub import get_hub

from queen.engine import frames
from queen.log import Log
from queen.settings import KEY_DIGITS, Settings, is_key

log = Log("encryption")

_IV = 16  # as stored; the nonce is its first 12 bytes
_NONCE = 12
_TAG = 16
# From here on sealing takes a millisecond or so, which no other greenlet should have to wait for.
_THREAD_FROM = 256 << 10
_REMEMBERED = 100_000

Lane = tuple[bytes, bytes]  # tenant, queue


class QueueEncrypted(Exception):
    """A queue is encrypted and this broker has no key: nothing was stored in it."""

    def __init__(self, queue: str) -> None:
        super().__init__(f"queue {queue} is encrypted and this broker has no QUEEN_ENCRYPTION_KEY")


class _Envelope(msgspec.Struct):
    encrypted: str
    iv: str
    authTag: str


class Encryption:
    """The keys of one worker, and what it knows of the queues' flags.

    ``enabled`` tells that payloads can be sealed, ``opens`` that envelopes can be opened. Without a key,
    ``required`` makes an encrypted queue refuse what is written; otherwise it is stored as plain text with
    a warning.
    """

    def __init__(self, settings: Settings) -> None:
        self.required = settings.encryption_required
        key = settings.encryption_key
        self.enabled = is_key(key)
        if self.enabled:
            log.info("encryption service initialized (AES-256-GCM)")
        elif len(key) != KEY_DIGITS and key:
            log.warning("QUEEN_ENCRYPTION_KEY must be 64 hex chars; encryption DISABLED", len=len(key))
        elif key:
            log.warning("QUEEN_ENCRYPTION_KEY is not valid hex; encryption DISABLED")
        texts = [key, *settings.encryption_keys_old.split(",")]
        self._keys = [AESGCM(bytes.fromhex(text)) for text in map(str.strip, texts) if is_key(text)]
        self.opens = bool(self._keys)
        self._flags: dict[Lane, bool] = {}

    # Queues

    def flag(self, lane: Lane) -> bool | None:
        """Whether a queue is encrypted, as last heard; None: nobody said."""
        return self._flags.get(lane)

    def learn(self, lane: Lane, encrypted: bool) -> None:
        """Remembers what a write was told of its queue."""
        if len(self._flags) >= _REMEMBERED:
            self._flags.clear()
        self._flags[lane] = encrypted

    def forget(self, lane: Lane) -> None:
        """The queue was configured or deleted."""
        self._flags.pop(lane, None)

    # Payloads

    def seal(self, payload: bytes) -> bytes:
        """The envelope of a payload. Only while ``enabled``."""
        if len(payload) >= _THREAD_FROM:
            sealed: bytes = get_hub().threadpool.apply(self._seal, (payload,))
            return sealed
        return self._seal(payload)

    def _seal(self, payload: bytes) -> bytes:
        iv = os.urandom(_IV)
        data = self._keys[0].encrypt(iv[:_NONCE], payload, None)
        return b'{"encrypted":"%b","iv":"%b","authTag":"%b"}' % (
            b64encode(data[:-_TAG]),
            b64encode(iv),
            b64encode(data[-_TAG:]),
        )

    def seal_frame(self, frame: bytes) -> bytes:
        """The same message with its payload sealed; a frame that says it is sealed stays as it is."""
        if frames.is_encrypted(frame):
            return frame
        message = frames.decode(frame)
        return frames.encode_frame(
            message.message_id,
            message.transaction_id,
            self.seal(message.payload),
            message.subject,
            message.trace_id,
            encrypted=True,
        )

    def open(self, payload: bytes) -> bytes:
        """What an envelope holds; any other payload, and an envelope that no key opens, as it is."""
        if not self.opens or b'"authTag"' not in payload:
            return payload
        if len(payload) >= _THREAD_FROM:
            opened: bytes = get_hub().threadpool.apply(self._open, (payload,))
            return opened
        return self._open(payload)

    def _open(self, payload: bytes) -> bytes:
        try:
            envelope = msgspec.json.decode(payload, type=_Envelope)
            data = b64decode(envelope.encrypted, validate=True)
            iv = b64decode(envelope.iv, validate=True)
            tag = b64decode(envelope.authTag, validate=True)
        except (msgspec.DecodeError, BadBase64, ValueError, RecursionError):
            return payload
        if len(iv) != _IV or len(tag) != _TAG:
            return payload
        for key in self._keys:
            try:
                return key.decrypt(iv[:_NONCE], data + tag, None)
            except InvalidTag:
                continue
        log.sampled(10, "payload handed out as stored: none of the keys opens it")
        return payload
