"""Envelopes: the documented bytes, every payload, every key, and whatever is no envelope."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queen.engine import encryption, frames
from queen.engine.encryption import Encryption
from queen.settings import Settings

KEY = bytes(range(32)).hex()
OTHER = bytes(32).hex()
KNOWN = b'{"encrypted":"PCC+fqmJrTm3Y+Dkw4UcT/4=","iv":"AAECAwQFBgcICQoLDA0ODw==","authTag":"Qun9eJsVRR6jGlyZrA3Wkw=="}'
PLAIN = b'{"hello":"world"}'


def made(key: str = KEY, old: str = "", required: bool = True) -> Encryption:
    return Encryption(
        Settings(encryption_key=key, encryption_keys_old=old, encryption_required=required),
    )


def test_the_documented_envelope_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encryption.os, "urandom", lambda n: bytes(range(n)))
    assert made().seal(PLAIN) == KNOWN


def test_the_documented_envelope_is_read() -> None:
    assert made().open(KNOWN) == PLAIN
    assert made(KEY.upper()).open(KNOWN) == PLAIN


def test_an_envelope_is_read_whatever_its_spelling() -> None:
    loose = json.dumps({"x": 1, **json.loads(KNOWN)}, indent=1).encode()
    assert made().open(loose) == PLAIN


@given(st.binary(max_size=2000))
def test_what_is_sealed_opens_as_it_was(payload: bytes) -> None:
    one = made()
    sealed = one.seal(payload)
    assert one.open(sealed) == payload
    assert list(json.loads(sealed)) == ["encrypted", "iv", "authTag"]
    assert one.seal(payload) != sealed


def test_a_large_payload_is_sealed_and_opened_in_a_thread() -> None:
    payload = b'"%b"' % (b"x" * (1 << 20))
    assert made().open(made().seal(payload)) == payload


def test_a_sealed_envelope_comes_back_as_the_envelope() -> None:
    one = made()
    assert one.open(one.seal(KNOWN)) == KNOWN


def test_former_keys_still_read() -> None:
    rotated = made(OTHER, old=f"{'ab' * 32}, {KEY}")
    assert rotated.open(KNOWN) == PLAIN
    assert made(OTHER).open(rotated.seal(PLAIN)) == PLAIN


def _changed(**fields: Any) -> bytes:
    return json.dumps({**json.loads(KNOWN), **fields}).encode()


@pytest.mark.parametrize(
    "payload",
    [
        _changed(iv=b64encode(bytes(12)).decode()),
        _changed(authTag=b64encode(bytes(15)).decode()),
        _changed(authTag=b64encode(bytes(16)).decode()),
        _changed(encrypted="no base64!"),
        _changed(encrypted="\u00e9"),
        _changed(iv=7),
        b'["authTag"]',
        b'{"authTag":' + b"[" * 100_000,
        b'"authTag"',
        b"",
    ],
)
def test_what_does_not_open_stays_as_it_is(payload: bytes) -> None:
    assert made().open(payload) == payload


def test_the_wrong_key_gives_the_envelope() -> None:
    assert made(OTHER).open(KNOWN) == KNOWN
    assert made("").open(KNOWN) == KNOWN


@pytest.mark.parametrize("key", [KEY + "\n", KEY[:-1], "g" * 64, "é" * 64, "0x" + KEY[2:]])
def test_a_key_of_the_wrong_form_encrypts_nothing(key: str) -> None:
    assert not made(key, required=False).enabled


def test_a_sealed_frame_keeps_all_but_its_payload() -> None:
    one = made()
    plain = frames.encode_frame(bytes(range(16)), b"key", PLAIN, b"me", bytes(range(16, 32)))
    sealed = one.seal_frame(plain)
    message = frames.decode(sealed)
    assert message.encrypted
    assert message._replace(payload=one.open(message.payload), encrypted=False) == frames.decode(plain)
    assert one.seal_frame(sealed) is sealed


def test_flags_are_remembered_until_the_queue_changes() -> None:
    one = made()
    lane = (bytes(16), b"q")
    assert one.flag(lane) is None
    one.learn(lane, True)
    assert one.flag(lane) is True
    one.forget(lane)
    assert one.flag(lane) is None
