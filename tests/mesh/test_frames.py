"""The wire format: the documented bytes, any payload there and back, and every way to be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queen.engine.identifiers import DEFAULT_TENANT
from queen.mesh.frames import LIMIT, BadFrame, FrameReader, Tag, batches, decode_object, encode, encode_object, item

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def from_bytes(data: bytes, chunk: int = 1 << 20) -> Callable[[int], bytes]:
    """What a socket would give of these bytes, at most so many at a time."""
    at = 0

    def receive(count: int) -> bytes:
        nonlocal at
        part = data[at : at + min(count, chunk)]
        at += len(part)
        return part

    return receive


def reader(data: bytes, chunk: int = 1 << 20) -> FrameReader:
    return FrameReader(from_bytes(data, chunk), nullcontext)


def test_the_documented_bytes() -> None:
    assert encode(Tag.HEARTBEAT).hex() == "0000000103"
    flip = encode_object(Tag.MAINTENANCE_MODE_SET, {"enabled": True})
    assert flip.hex() == "00000011287b22656e61626c6564223a747275657d"
    wake = encode(Tag.MESSAGE_AVAILABLE, item((DEFAULT_TENANT, b"orders", b"eu")))
    payload = b'{"queue":"orders","partition":"eu","tenant":"00000000-0000-0000-0000-000000000001"}'
    assert len(payload) == 83
    assert wake == bytes.fromhex("0000005401") + payload


@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=300)), max_size=8), st.integers(1, 40))
def test_frames_come_out_as_they_went_in_however_they_are_cut(frames: list[tuple[int, bytes]], chunk: int) -> None:
    stream = reader(b"".join(encode(tag, payload) for tag, payload in frames), chunk)
    for frame in frames:
        assert stream.read() == frame
    assert stream.read() is None


@given(st.binary(max_size=200))
def test_garbage_is_frames_or_a_bad_frame_and_nothing_else(garbage: bytes) -> None:
    stream = reader(garbage)
    with pytest.raises((BadFrame, StopIteration)):
        while stream.read() is not None:
            pass
        raise StopIteration


@pytest.mark.parametrize("length", [0, LIMIT + 1, 2**31, 2**32 - 1])
def test_a_bad_length_is_refused_before_anything_is_read(length: int) -> None:
    asked: list[int] = []
    receive = from_bytes(length.to_bytes(4, "big") + b"x" * 100)

    def watched(count: int) -> bytes:
        asked.append(count)
        return receive(count)

    with pytest.raises(BadFrame):
        FrameReader(watched, nullcontext).read()
    assert len(asked) == 1


def test_the_largest_frame_is_accepted() -> None:
    frame = encode(Tag.HOTLIST_DIRTY_BATCH, b" " * (LIMIT - 1))
    assert frame[:4] == LIMIT.to_bytes(4, "big")
    read = reader(frame).read()
    assert read is not None
    assert len(read[1]) == LIMIT - 1


@given(st.integers(1, 10))
def test_a_frame_that_is_cut_short_is_bad(missing: int) -> None:
    frame = encode(Tag.HEARTBEAT, b"1234567")
    with pytest.raises(BadFrame, match="cut short"):
        reader(frame[:-missing]).read()


def test_large_frames_are_read_one_by_one() -> None:
    held: list[str] = []

    class Slot:
        def __enter__(self) -> None:
            held.append("in")

        def __exit__(self, *_: object) -> None:
            held.append("out")

    small, large = encode(Tag.HEARTBEAT, b" " * 1000), encode(Tag.HEARTBEAT, b" " * 300_000)
    stream = FrameReader(from_bytes(small + large + small), Slot)
    assert [len(frame[1]) for frame in iter(stream.read, None) if frame] == [1000, 300_000, 1000]
    assert held == ["in", "out"]


@given(names, names, st.one_of(st.none(), names))
def test_an_item_spells_its_names(queue: str, partition: str, group: str | None) -> None:
    value = json.loads(item((DEFAULT_TENANT, queue.encode(), partition.encode()), group.encode() if group else None))
    expected = {"queue": queue, "partition": partition, "tenant": "00000000-0000-0000-0000-000000000001"}
    assert value == expected | ({"group": group} if group else {})


def test_no_batch_is_empty_and_none_passes_the_limit() -> None:
    assert list(batches(Tag.HOTLIST_DIRTY_BATCH, [])) == []
    elements = [json.dumps({"queue": "q" * 200, "partition": str(number)}).encode() for number in range(90_000)]
    frames = list(batches(Tag.HOTLIST_DIRTY_BATCH, elements))
    assert len(frames) > 2
    assert all(len(frame) < LIMIT for frame in frames)
    values = [decode_object(frame[5:]) for frame in frames]
    found = [element["partition"] for value in values if value for element in value["items"]]
    assert found == [str(number) for number in range(90_000)]


@pytest.mark.parametrize(
    "payload", [b"", b"[]", b"1", b"null", b"{", b'{"a":}', b"\xff", b"[" * 100_000, b'{"a":NaN}', b"\xef\xbb\xbf{}"]
)
def test_what_is_no_json_object_is_none(payload: bytes) -> None:
    assert decode_object(payload) is None


@pytest.mark.parametrize("junk", [b"[],", b"{},", b"1,", b'"",', b"[[]],", b'{"a":[]},'])
def test_a_large_payload_of_mostly_punctuation_is_not_decoded(junk: bytes) -> None:
    payload = b'{"items":[' + junk * (LIMIT // len(junk) - 10) + b"1]}"
    assert decode_object(payload) is None
