"""The handshake: the HELLO that opens every connection, and who lets it in.

The secret proves that a dialler knows it, by an HMAC over a nonce that the dialler draws. It doesn't cover
what comes later on the connection; a captured HELLO is useless at a listener that has seen its nonce.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from queen import codec
from queen.mesh.frames import Tag, decode_object, encode

_NONCES = 65_536
_MAC = re.compile("[0-9a-fA-F]{64}")


class ReplayGuard(StrEnum):
    """What becomes of a HELLO whose nonce was seen before, when there is a secret."""

    REFUSE = "refuse"
    LOG = "log"
    OFF = "off"


class Refused(Exception):
    """The HELLO was not accepted; the message says why, for the log. The dialler is told nothing."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Who dialled. ``instance`` names the process, where the dialler sends that."""

    server_id: str
    instance: str = ""
    replayed: bool = False


def mac(secret: bytes, nonce: str) -> str:
    """What a HELLO proves the secret with: the HMAC-SHA256 of the nonce's text, not of the bytes it spells."""
    return hmac.new(secret, nonce.encode("utf-8"), "sha256").hexdigest()


def hello(server_id: str, instance: str, secret: bytes) -> bytes:
    """A fresh HELLO frame; without a secret it proves nothing."""
    nonce = secrets.token_hex(16)
    proof = mac(secret, nonce) if secret else ""
    return encode(Tag.HELLO, codec.dumps({"server_id": server_id, "nonce": nonce, "mac": proof, "instance": instance}))


class Doorkeeper:
    """Verifies HELLOs. Any of the secrets will do, so that one can be replaced broker by broker."""

    def __init__(self, accepted: Sequence[bytes] = (), guard: ReplayGuard = ReplayGuard.REFUSE) -> None:
        self._secrets = [secret for secret in accepted if secret]
        self._guard = guard
        self._nonces: OrderedDict[str, None] = OrderedDict()
        self.replays = 0

    def admit(self, tag: int, payload: bytes) -> Hello:
        """Who dialled, by the first frame of a connection. Raises `Refused`."""
        if tag != Tag.HELLO:
            raise Refused(f"first frame has tag {tag}")
        value = decode_object(payload) or {}
        server_id, instance = value.get("server_id"), value.get("instance")
        if not isinstance(server_id, str) or not server_id:
            raise Refused("HELLO without server_id")
        nonce = value.get("nonce")
        replayed = False
        if self._secrets:
            self._verify(nonce, value.get("mac"))
            assert isinstance(nonce, str)
            replayed = self._seen(nonce)
        return Hello(server_id, instance if isinstance(instance, str) else "", replayed)

    def _verify(self, nonce: object, proof: object) -> None:
        if not isinstance(nonce, str) or not isinstance(proof, str):
            raise Refused("HELLO without nonce or mac")
        if not _MAC.fullmatch(proof):
            raise Refused("HELLO is not signed" if not proof else "HELLO with a malformed mac")
        try:
            proofs = [mac(secret, nonce) for secret in self._secrets]
        except UnicodeEncodeError:
            raise Refused("HELLO with a malformed nonce") from None
        # All of them are compared, whichever fits.
        if not sum(hmac.compare_digest(expected, proof.lower()) for expected in proofs):
            raise Refused("HELLO signed with another secret")

    def _seen(self, nonce: str) -> bool:
        """Remembers a nonce of a verified HELLO; whether it was there. Raises `Refused` for one, as told."""
        if self._guard is ReplayGuard.OFF:
            return False
        replayed = nonce in self._nonces
        self._nonces[nonce] = None
        self._nonces.move_to_end(nonce)
        if len(self._nonces) > _NONCES:
            self._nonces.popitem(last=False)
        if replayed:
            self.replays += 1
            if self._guard is ReplayGuard.REFUSE:
                raise Refused("HELLO was used before")
        return replayed
