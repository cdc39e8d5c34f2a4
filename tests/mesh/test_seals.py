"""Seals of frames: their bytes, and that nothing altered, repeated, late or unsealed passes."""

from __future__ import annotations

import hashlib
import hmac
import json
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queen import codec
from queen.mesh.frames import FrameReader, Tag, Unwelcome, encode, encode_object
from queen.mesh.seals import SealCheck, Sealer, seal_key
from tests.mesh.test_frames import from_bytes

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

SECRET = b"s3cr3t"
NONCE = "00112233445566778899aabbccddeeff"
KEY = seal_key(SECRET, NONCE)

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
objects = st.dictionaries(
    names, st.recursive(st.none() | st.integers(-9, 9) | names, st.lists, max_leaves=5), max_size=4
)
tags = st.integers(0, 255)


def sealed(*frames: bytes, key: bytes = KEY) -> list[tuple[int, bytes]]:
    """Tags and payloads of frames as one connection would carry them."""
    sealer = Sealer(key)
    reader = FrameReader(from_bytes(b"".join(map(sealer.seal, frames))), nullcontext)
    return [frame for _ in frames if (frame := reader.read()) is not None]


def beats(count: int) -> list[tuple[int, bytes]]:
    return sealed(*[encode(Tag.HEARTBEAT)] * count)


def passes(*frames: tuple[int, bytes]) -> None:
    seals = SealCheck(KEY)
    for frame in frames:
        seals.check(*frame)


def test_the_documented_bytes() -> None:
    key = hmac.new(SECRET, b"queen-mesh-frame\n" + NONCE.encode(), hashlib.sha256).digest()
    flip = encode_object(Tag.MAINTENANCE_MODE_SET, {"enabled": True})
    for number, (frame, start) in enumerate(
        [(flip, b'{"enabled":true,'), (encode(Tag.HEARTBEAT), b"{"), (encode(Tag.HEARTBEAT, b"{}"), b"{")], 1
    ):
        start += b'"_n":%d,"_m":"' % number
        proof = hmac.new(key, number.to_bytes(8, "big") + frame[4:5] + start, hashlib.sha256).hexdigest()
        assert sealed(flip, *[frame] * (number - 1))[-1] == (frame[4], start + proof.encode() + b'"}')


@given(st.lists(st.tuples(tags, objects), max_size=5))
def test_what_is_sealed_passes_and_says_the_same_to_those_who_ignore_it(
    frames: list[tuple[int, dict[str, object]]],
) -> None:
    carried = sealed(*(encode(tag, codec.dumps(value)) for tag, value in frames))
    passes(*carried)
    for number, ((tag, value), (as_tag, payload)) in enumerate(zip(frames, carried, strict=True), 1):
        said = json.loads(payload)
        assert list(said)[-2:] == ["_n", "_m"]
        assert (as_tag, said.pop("_n"), len(said.pop("_m"))) == (tag, number, 64)
        assert said == value


@given(tags, objects, st.data())
def test_a_frame_that_was_altered_anywhere_is_unwelcome(
    tag: int, value: dict[str, object], data: st.DataObject
) -> None:
    ((_, payload),) = sealed(encode(tag, codec.dumps(value)))
    at = data.draw(st.integers(0, len(payload) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != payload[at]))
    with pytest.raises(Unwelcome):
        passes((tag, payload[:at] + bytes([byte]) + payload[at + 1 :]))
    with pytest.raises(Unwelcome):
        passes(((tag + 1) % 256, payload))


@given(st.lists(st.integers(0, 9), max_size=12))
def test_frames_pass_as_long_as_each_is_newer_than_the_last(order: list[int]) -> None:
    frames = beats(10)
    seals = SealCheck(KEY)
    last = -1
    for at in order:
        if at > last:
            seals.check(*frames[at])
            last = at
        else:
            with pytest.raises(Unwelcome, match=f"frame {at + 1} came after frame {last + 1}"):
                seals.check(*frames[at])


@given(st.binary(max_size=300))
def test_nothing_passes_by_luck(payload: bytes) -> None:
    for end in (b"", b'{"_n":1,"_m":"' + b"0" * 64 + b'"}'):
        with pytest.raises(Unwelcome):
            passes((Tag.HEARTBEAT, payload + end))


@pytest.mark.parametrize(
    "number", [b"0", b"-1", b"01", b"1.0", b"1e0", b"", b"99999999999999999999", b'"1"', b"true"], ids=bytes.decode
)
def test_a_counter_that_is_none_is_unwelcome_even_if_sealed(number: bytes) -> None:
    start = b'{"_n":%b,"_m":"' % number
    proof = hmac.digest(KEY, (1).to_bytes(8, "big") + b"\x03" + start, "sha256").hex().encode()
    with pytest.raises(Unwelcome, match="without a seal"):
        passes((Tag.HEARTBEAT, start + proof + b'"}'))


def test_seals_are_of_one_connection_and_one_secret() -> None:
    for key in (seal_key(SECRET, NONCE[::-1]), seal_key(b"other", NONCE)):
        with pytest.raises(Unwelcome, match="broken seal"):
            passes(*sealed(encode(Tag.HEARTBEAT), key=key))
