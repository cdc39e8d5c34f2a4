"""The handshake: the HELLO that opens every connection, and who lets it in.

A dialler proves that it knows the secret by an HMAC over a nonce that it draws. A captured HELLO is useless at a
listener that has seen its nonce. A second HMAC, which older brokers neither make nor ask for, signs who dials whom
and when, so that a captured HELLO is of no use anywhere a minute later; the frames of such a connection are sealed.
"""

from __future__ import annotations

import hmac
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from queen.mesh.frames import Tag, decode_object, encode_object
from queen.mesh.seals import Sealer, seal_key

_NONCES = 65_536
_MOST_SECONDS = 60
_MOST_SHOWN = 100  # of a text of the dialler's, in the log
_NONCE = re.compile("[0-9a-f]{32}")
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
    """Who dialled. ``instance`` names the process, where the dialler sends that. ``signed`` tells whether all
    of it is, and ``seal_key`` is of the seals that its frames must bear; none: they need not."""

    server_id: str
    instance: str = ""
    replayed: bool = False
    signed: bool = False
    seal_key: bytes = b""


def mac(secret: bytes, nonce: str) -> str:
    """What a HELLO proves the secret with: the HMAC-SHA256 of the nonce's text, not of the bytes it spells."""
    return hmac.new(secret, nonce.encode("utf-8"), "sha256").hexdigest()


def signature(secret: bytes, nonce: str, server_id: str, instance: str, ts: int, to: str) -> str:
    """What signs a HELLO as a whole: who dials whom, and when."""
    said = "\n".join(("queen-mesh-2", nonce, server_id, instance, str(ts), to))
    return hmac.new(secret, said.encode("utf-8"), "sha256").hexdigest()


def hello(server_id: str, instance: str, secret: bytes) -> bytes:
    """A fresh HELLO frame as it has always been; without a secret it proves nothing."""
    nonce = secrets.token_hex(16)
    proof = mac(secret, nonce) if secret else ""
    return encode_object(Tag.HELLO, {"server_id": server_id, "nonce": nonce, "mac": proof, "instance": instance})


def signed_hello(server_id: str, instance: str, secret: bytes, to: str) -> tuple[bytes, Sealer]:
    """A fresh HELLO frame that is signed, for the host and port that were dialled; and what seals the frames
    that follow (mesh spec, section 4.8 B and C)."""
    nonce = secrets.token_hex(16)
    ts = int(time.time())
    frame = encode_object(
        Tag.HELLO,
        {
            "server_id": server_id,
            "nonce": nonce,
            "mac": mac(secret, nonce),
            "instance": instance,
            "ts": ts,
            "to": to,
            "mac2": signature(secret, nonce, server_id, instance, ts, to),
        },
    )
    return frame, Sealer(seal_key(secret, nonce))


class Doorkeeper:
    """Verifies HELLOs. Any of the secrets will do, so that one can be replaced broker by broker.

    ``ids``, if there are any, are the server ids that get in. A ``strict`` one lets in only who signs all of
    it, and, if there are any ``names``, dialled one of them (``host:port``, in lower case).
    """

    def __init__(
        self,
        accepted: Sequence[bytes] = (),
        guard: ReplayGuard = ReplayGuard.REFUSE,
        ids: Collection[str] = (),
        strict: bool = False,
        names: Collection[str] = (),
    ) -> None:
        self._secrets = [secret for secret in accepted if secret]
        self._guard = guard
        self._ids = ids
        self._strict = strict
        self._names = names
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
        if self._ids and server_id not in self._ids:
            raise Refused(f"server id {server_id[:_MOST_SHOWN]} is not in QUEEN_MESH_ALLOWED_IDS")
        if not isinstance(instance, str):
            instance = ""
        if not self._secrets:
            return Hello(server_id, instance)
        nonce, secret = self._verify(value.get("nonce"), value.get("mac"))
        signed = "mac2" in value
        if signed:
            self._verify_signature(secret, value)
        if self._strict:
            self._verify_strictly(nonce, value)
        key = seal_key(secret, nonce) if self._strict else b""
        return Hello(server_id, instance, self._seen(nonce), signed, key)

    def _verify(self, nonce: object, proof: object) -> tuple[str, bytes]:
        """The nonce of a HELLO and the secret that it proves. Raises `Refused`."""
        if not isinstance(nonce, str) or not isinstance(proof, str):
            raise Refused("HELLO without nonce or mac")
        if not _MAC.fullmatch(proof):
            raise Refused("HELLO is not signed" if not proof else "HELLO with a malformed mac")
        try:
            # All of them are compared, whichever fits.
            fit = [secret for secret in self._secrets if hmac.compare_digest(mac(secret, nonce), proof.lower())]
        except UnicodeEncodeError:
            raise Refused("HELLO with a malformed nonce") from None
        if not fit:
            raise Refused("HELLO signed with another secret")
        return nonce, fit[0]

    def _verify_signature(self, secret: bytes, value: dict[str, Any]) -> None:
        texts = [value.get(name) for name in ("nonce", "server_id", "instance", "to", "mac2")]
        ts = value.get("ts")
        # A line feed would make two HELLOs the same text.
        if not all(isinstance(text, str) and "\n" not in text for text in texts) or type(ts) is not int:
            raise Refused("HELLO with mac2, but not all that it signs")
        nonce, server_id, instance, to, proof = map(str, texts)
        try:
            expected = signature(secret, nonce, server_id, instance, ts, to)
        except UnicodeEncodeError:
            raise Refused("HELLO with malformed text") from None
        if not _MAC.fullmatch(proof) or not hmac.compare_digest(expected, proof.lower()):
            raise Refused("HELLO with a wrong mac2")
        late = int(time.time()) - ts
        if abs(late) > _MOST_SECONDS:
            raise Refused(
                f"HELLO of {abs(late)} s {'ago' if late > 0 else 'ahead'}: was it recorded, or is a clock wrong?"
            )

    def _verify_strictly(self, nonce: str, value: dict[str, Any]) -> None:
        if "mac2" not in value:
            raise Refused("HELLO without mac2, which QUEEN_MESH_STRICT asks for: a broker of an older release?")
        if not _NONCE.fullmatch(nonce):
            raise Refused("HELLO with a nonce that is not 32 hexadecimal digits")
        if self._names and value["to"].lower() not in self._names:
            raise Refused(f"HELLO for {value['to'][:_MOST_SHOWN]}, which is not in QUEEN_MESH_NAMES")

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
