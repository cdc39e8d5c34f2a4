"""JSON in and out: the general codec, and bodies whose payloads stay the bytes that were sent."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from queen import codec
from queen.api import push
from queen.api.answers import Refusal
from queen.api.bodies import Decoder, Masks

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=20
)

# Strings as they may be written: characters, escapes of every kind, halves of pairs, private characters.
hex_digits = st.sampled_from("0123456789abcdefABCDEF")
surrogates = st.integers(0xD800, 0xDFFF)
private = st.integers(0xE000, 0xF8FF)
escapes = (surrogates | private | st.integers(0, 0xFFFF)).flatmap(
    lambda code: st.sampled_from([f"\\u{code:04x}", f"\\u{code:04X}"])
)
pieces = (
    st.sampled_from(
        ["\\\\", '\\"', "\\/", "\\n", "\\u0000", "\\ud83d\\ude00", "\\\\ud800", "\\\\\\ud800", "ud800", "d800"]
    )
    | escapes
    | private.map(chr)
    | st.characters(exclude_categories=["Cs"], exclude_characters='"\\', min_codepoint=0x20)
)
strings = st.lists(pieces, max_size=12).map(lambda parts: '"' + "".join(parts) + '"')
numbers = st.from_regex(r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,4})?", fullmatch=True)
blanks = st.text(" \t\r\n", max_size=3)
written = st.recursive(
    strings | numbers | st.sampled_from(["null", "true", "false", "[]", "{}"]),
    lambda inner: st.one_of(
        st.builds(
            lambda items, blank: f"[{blank}" + f"{blank},".join(items) + f"{blank}]",
            st.lists(inner, min_size=1, max_size=4),
            blanks,
        ),
        st.builds(
            lambda members, blank: "{" + f",{blank}".join(f"{key}{blank}:{value}" for key, value in members) + "}",
            st.lists(st.tuples(strings, inner), min_size=1, max_size=4),
            blanks,
        ),
    ),
    max_leaves=8,
)

raws = Decoder(list[msgspec.Raw])


def plain(text: str | bytes) -> str:
    """All that a JSON text says, without escapes; keys that repeat are kept."""
    return json.dumps(json.loads(text, object_pairs_hook=list), ensure_ascii=False)


def accepted(data: bytes) -> bool:
    """Whether the standard library takes this for JSON, were it as strict as it should be."""

    def refuse(name: str) -> Any:
        raise ValueError(name)

    try:
        json.loads(data.decode(), parse_constant=refuse)
    except ValueError:
        return False
    return True


# The general codec


@given(values)
def test_what_is_encoded_is_decoded(value: Any) -> None:
    data = codec.dumps(value)
    assert data.isascii()
    assert b"\n" not in data
    assert codec.loads(data) == value


@given(st.text(st.characters(), max_size=20))
def test_unpaired_surrogates_pass_through(text: str) -> None:
    assert codec.loads(codec.dumps(text)) == text


@pytest.mark.parametrize("number", ["0", "-0", "9" * 400, "-" + "9" * 4000, "1.5", "1e300", "0.1"])
def test_a_number_keeps_its_value(number: str) -> None:
    value = codec.loads(number.encode())
    assert value == (float(number) if set(number) & set(".e") else int(number))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [float("-inf")]])
def test_what_is_no_number_is_null(value: Any) -> None:
    assert codec.dumps(value) in (b"null", b"[null]")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"NaN",
        b"[Infinity]",
        b'{"a":-Infinity}',
        b"{",
        b"[1,]",
        b"01",
        b'"\xff"',
        b'"\xed\xa0\x80"',
        b'"a\nb"',
        b"\xef\xbb\xbf1",
        b"1 2",
        b"9" * 5000,
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=lambda data: repr(data[:12]),
)
def test_what_is_no_json_is_an_error(data: bytes) -> None:
    with pytest.raises(codec.JsonError) as error:
        codec.loads(data)
    assert str(error.value)


@given(st.binary(max_size=30))
def test_arbitrary_bytes_are_json_or_an_error(data: bytes) -> None:
    try:
        codec.loads(data)
    except codec.JsonError:
        assert not accepted(data)
    else:
        assert accepted(data)


# Bodies with raw payloads


@given(st.lists(written, max_size=4), blanks)
@example([r'"\ud800"'], "")
@example([r'"\ue000\ud800"', '"\ue001"', r'"\uE002"'], " ")
@example([r'"\\ue000\ud800"', r'"\\\ud800\\ud800"'], " ")
def test_payloads_stay_the_bytes_that_were_sent(payloads: list[str], blank: str) -> None:
    sent = [payload.encode() for payload in payloads]
    body = b",".join(
        b'{"queue":"q","payload":%b%b%b,"partition":"p"}' % (blank.encode(), p, blank.encode()) for p in sent
    )
    items = push.read(b'{"items":[%b]}' % body)
    assert [bytes(item.payload) for item in items] == sent


@given(written)
def test_masks_are_taken_back_exactly(text: str) -> None:
    body = text.encode()
    masks = Masks(body)
    assert masks.restore(masks.masked) == body
    assert len(masks.masked) == len(body)
    msgspec.json.decode(masks.masked, type=msgspec.Raw)
    assert not any(mark in text for mark in masks.text)
    assert bool(masks.text) == any(0xD800 <= ord(c) <= 0xDFFF for c in plain(text))


@given(written)
def test_a_masked_text_is_readable(text: str) -> None:
    masks = Masks(text.encode())
    expected = "".join("\ufffd" if 0xD800 <= ord(c) <= 0xDFFF else c for c in plain(text))
    assert masks.readable(plain(masks.masked)) == expected


def test_every_half_of_a_pair_can_be_masked_beside_most_private_characters() -> None:
    halves = b" ".join(b"\\u%04x" % code for code in range(0xD800, 0xE000))
    taken = "".join(map(chr, range(0xE000, 0xE000 + 4000))).encode()
    body = b'["%b","%b"]' % (taken, halves)
    masks = Masks(body)
    assert len(masks.text) == 2048
    assert masks.restore(masks.masked) == body


def test_a_body_that_leaves_no_masks_is_refused() -> None:
    body = b'["%b\\ud800"]' % "".join(map(chr, range(0xE000, 0xF900))).encode()
    with pytest.raises(Refusal):
        Masks(body)


@given(written, st.data())
def test_a_damaged_body_is_refused_unless_it_is_json_still(text: str, data: st.DataObject) -> None:
    body = bytearray(text.encode())
    at = data.draw(st.integers(0, len(body) - 1))
    if data.draw(st.booleans()):
        del body[at]
    else:
        body[at : at + 1] = data.draw(
            st.binary(max_size=2) | st.sampled_from([b"\\", b'"', b"NaN", b"[", b",", b"\x00"])
        )
    check(b"[%b]" % bytes(body))


@given(st.text('[]{}":,\\u0d8fe+-.19truefalsn \t\x00\x1f', max_size=15))
@example(r'"\ud800\u"')
@example(r'"\ud800" x')
@example("1e400")
@example("-")
@example("1,NaN")
def test_arbitrary_text_is_taken_when_it_is_json(text: str) -> None:
    check(b"[%b]" % text.encode())


@given(st.binary(max_size=12))
def test_arbitrary_bytes_are_taken_when_they_are_json(data: bytes) -> None:
    check(b'["%b"]' % data)


def check(body: bytes) -> None:
    """The decoder takes what the standard library takes, and refuses the rest with a 400."""
    try:
        raws.decode(body)
    except Refusal as refusal:
        assert refusal.status == 400
        assert refusal.body["error"].startswith("bad body: ")
        assert not accepted(body)
    else:
        assert accepted(body)
