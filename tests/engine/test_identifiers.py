"""Message ids, UUIDs in text, and fingerprints."""

from __future__ import annotations

import time
import uuid
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queen.engine.identifiers import Minter, fingerprint, parse_uuid, uuid_text

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

MILLISECOND = 1_000_000


class Clock:
    """Stands in for the wall clock: each reading is the next of a list, then the last one for ever."""

    def __init__(self, *milliseconds: int) -> None:
        self._readings = list(milliseconds)

    def __call__(self) -> int:
        reading = self._readings[0] if len(self._readings) == 1 else self._readings.pop(0)
        return reading * MILLISECOND


def minted(monkeypatch: pytest.MonkeyPatch, clock: Clock, count: int) -> list[bytes]:
    monkeypatch.setattr(time, "time_ns", clock)
    minter = Minter()
    return [minter.mint() for _ in range(count)]


def milliseconds(value: bytes) -> int:
    return int.from_bytes(value[:6], "big")


def test_an_id_is_a_version_7_uuid_of_this_moment() -> None:
    before = time.time_ns() // MILLISECOND
    value = uuid.UUID(bytes=Minter().mint())
    assert (value.version, value.variant) == (7, uuid.RFC_4122)
    assert before <= milliseconds(value.bytes) <= time.time_ns() // MILLISECOND


def test_ids_only_grow() -> None:
    minter = Minter()
    values = [minter.mint() for _ in range(50_000)]
    assert values == sorted(set(values))
    assert {uuid.UUID(bytes=value).version for value in values} == {7}
    assert {value[8] >> 6 for value in values} == {2}


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=50))
def test_ids_grow_whatever_the_clock_does(readings: list[int]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        values = minted(monkeypatch, Clock(*readings), 60)
    assert values == sorted(set(values))
    assert milliseconds(values[-1]) >= max(readings[:60])


def test_a_burst_runs_ahead_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    values = minted(monkeypatch, Clock(1000), 3 * 4096 + 1)
    assert values == sorted(set(values))
    assert [milliseconds(values[at]) for at in (0, 4095, 4096, -1)] == [1000, 1000, 1001, 1003]


def test_a_clock_that_steps_back_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    values = minted(monkeypatch, Clock(5000, 1000, 1000, 5001), 4)
    assert [milliseconds(value) for value in values] == [5000, 5000, 5000, 5001]


def test_two_minters_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", Clock(1000))
    one, other = Minter(), Minter()
    assert not {one.mint() for _ in range(2000)} & {other.mint() for _ in range(2000)}


@given(st.uuids())
def test_text_and_bytes_of_a_uuid_are_the_same(value: uuid.UUID) -> None:
    text = uuid_text(value.bytes)
    assert text == str(value)
    for form in (text, text.upper(), value.hex, f"{{{text}}}"):
        assert parse_uuid(form) == value.bytes


@given(st.text(max_size=40) | st.text("0123456789abcdefABCDEF-{} ", max_size=50))
def test_what_is_parsed_has_sixteen_bytes(text: str) -> None:
    value = parse_uuid(text)
    assert value is None or (len(value) == 16 and value.hex() in text.lower().replace("-", ""))


@pytest.mark.parametrize(
    "text", ["", "0" * 31, "0" * 33, "g" * 32, "00 " * 10 + "00", "\u0661" * 32, "0x" + "0" * 30, "+" + "0" * 31]
)
def test_what_is_no_uuid_is_none(text: str) -> None:
    assert parse_uuid(text) is None


@given(st.binary(max_size=100))
def test_a_fingerprint_is_128_bits_of_blake2b(key: bytes) -> None:
    """Stored hashes outlive the code that wrote them."""
    assert fingerprint(key) == blake2b(key, digest_size=16).digest()


def test_the_fingerprint_of_a_key_never_changes() -> None:
    assert fingerprint(b"").hex() == "cae66941d9efbd404e4d88758ea67670"
