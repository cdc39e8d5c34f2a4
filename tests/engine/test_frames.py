"""Segments and frames: what is packed is unpacked, and what is no segment is said to be none."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from queen.engine import frames
from queen.engine.frames import BadSegment, Frame

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

ids = st.binary(min_size=16, max_size=16)
texts = st.binary(max_size=300) | st.integers(65_500, 65_535).map(lambda size: b"t" * size)
payloads = st.binary(max_size=2000) | st.integers(0, 60_000).map(lambda size: b"\x00" * size)
any_frame = st.builds(Frame, ids, texts, payloads, st.none() | ids, st.none() | texts, st.booleans())
small_frame = st.builds(
    Frame,
    ids,
    st.binary(max_size=9),
    st.binary(max_size=9),
    st.none() | ids,
    st.none() | st.binary(max_size=9),
    st.booleans(),
)
levels = st.sampled_from([0, 1, 3])


def encoded(frame: Frame) -> bytes:
    return frames.encode_frame(
        frame.message_id, frame.transaction_id, frame.payload, frame.subject, frame.trace_id, frame.encrypted
    )


def packed(contents: list[Frame], level: int = 0) -> bytes:
    return frames.pack([encoded(frame) for frame in contents], level)


@given(st.lists(any_frame, max_size=8), levels)
def test_what_is_packed_is_unpacked(contents: list[Frame], level: int) -> None:
    assert frames.unpack(packed(contents, level)) == contents


@given(st.lists(small_frame, max_size=8), st.data())
def test_any_run_of_frames_can_be_taken(contents: list[Frame], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(contents)))
    take = data.draw(st.integers(0, len(contents) - start))
    assert frames.unpack(packed(contents), start, take) == contents[start : start + take]


@given(st.lists(small_frame, max_size=4), st.integers(0, 9), st.integers(1, 9))
def test_more_frames_than_there_are_can_not_be_taken(contents: list[Frame], start: int, more: int) -> None:
    take = max(len(contents) - start, 0) + more
    with pytest.raises(BadSegment):
        frames.unpack(packed(contents), start, take)


@given(st.lists(small_frame, min_size=1, max_size=4), st.data())
def test_a_truncated_segment_never_passes_for_the_whole(contents: list[Frame], data: st.DataObject) -> None:
    blob = packed(contents)
    cut = data.draw(st.integers(0, len(blob) - 1))
    with pytest.raises(BadSegment):
        frames.unpack(blob[:cut], 0, len(contents))


@given(st.floats(0, 1, exclude_max=True))
def test_a_truncated_compressed_segment_is_none(part: float) -> None:
    blob = packed([Frame(os.urandom(16), b"t", b"\x00" * 1000) for _ in range(20)], level=1)
    assert blob[:1] == b"\x01"
    with pytest.raises(BadSegment):
        frames.unpack(blob[: int(part * len(blob))], 0, 20)


@given(st.lists(small_frame, min_size=1, max_size=4), st.data())
def test_a_changed_byte_is_another_segment_or_none(contents: list[Frame], data: st.DataObject) -> None:
    blob = bytearray(packed(contents))
    at = data.draw(st.integers(0, len(blob) - 1))
    blob[at] ^= data.draw(st.integers(1, 255))
    with suppress(BadSegment):
        assert frames.unpack(bytes(blob)) != contents


@given(st.binary(max_size=200))
@example(b"")
@example(b"\x00" + b"\x13\x00\x00\x00" + b"\x01" + b"\x00" * 18)
@example(b"\x00" + b"\x13\x00\x00\x00" + b"\x08" + b"\x00" * 18)
@example(b"\x01")
def test_arbitrary_bytes_are_frames_or_a_bad_segment(blob: bytes) -> None:
    try:
        contents = frames.unpack(blob)
    except BadSegment:
        return
    assert packed(contents) == b"\x00" + blob[1:] or blob[:1] == b"\x01"


def test_a_frame_lies_as_documented() -> None:
    """Stored blobs outlive the code that wrote them: these bytes may never change their meaning."""
    plain = frames.encode_frame(bytes(range(16)), b"key", b"{}")
    assert plain == bytes.fromhex("1800000000000102030405060708090a0b0c0d0e0f03006b65797b7d")
    full = frames.encode_frame(bytes(range(16)), b"k", b"1", b"me", bytes(range(16, 32)), encrypted=True)
    assert full == bytes.fromhex(
        "2900000007000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f01006b02006d6531"
    )
    assert frames.pack([plain, full], 1) == b"\x00" + plain + full


def test_compression_is_used_where_it_pays() -> None:
    compressible = packed([Frame(b"i" * 16, b"t", b"a" * 10_000)], level=1)
    assert (compressible[:1], len(compressible) < 200) == (b"\x01", True)
    assert packed([Frame(b"i" * 16, b"t", b"a" * 10_000)], level=0)[:1] == b"\x00"
    assert packed([Frame(b"i" * 16, b"t", b"a" * 100)], level=1)[:1] == b"\x00"


def test_a_large_segment_goes_through_the_thread_pool_and_back() -> None:
    contents = [Frame(b"i" * 16, b"t", bytes(range(256)) * 10_000)]
    assert frames.unpack(packed(contents, level=1)) == contents


def test_an_unknown_container_is_no_segment() -> None:
    with pytest.raises(BadSegment):
        frames.unpack(b"\x02" + packed([])[1:])
