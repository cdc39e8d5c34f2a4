"""The format of spool files, written and read: whole, cut, and damaged."""

from __future__ import annotations

import json
import struct

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from queen.engine.frames import Frame
from queen.engine.identifiers import DEFAULT_TENANT
from queen.spool import records
from queen.spool.records import Event

TENANT = bytes.fromhex("00000000000000000000000000000007")

_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).map(str.encode)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab"\\,', max_size=3), inner, max_size=3),
    max_leaves=5,
)
_events = st.builds(
    Event,
    st.tuples(st.sampled_from([DEFAULT_TENANT, TENANT]), _text, _text),
    st.builds(
        Frame,
        st.binary(min_size=16, max_size=16),
        _text,
        _json.map(lambda value: json.dumps(value, indent=1).encode()),
        subject=st.none() | _text,
        trace_id=st.none(),
        encrypted=st.booleans(),
    ),
    st.integers(1, 2**41),
)


@given(st.lists(_events, max_size=5))
def test_what_is_written_is_read(events: list[Event]) -> None:
    data = records.encode(events)
    assert records.parse(data) == records.Contents(events)
    assert records.count(data) == len(events)
    assert records.partitions(data) == (len(events), {event.key for event in events})


@given(st.lists(_events, min_size=1, max_size=4), st.data())
def test_a_file_cut_anywhere_gives_all_before_the_cut(events: list[Event], data: st.DataObject) -> None:
    whole = records.encode(events)
    at = data.draw(st.integers(0, len(whole) - 1))
    contents = records.parse(whole[:at])
    ends = [len(records.encode(events[: k + 1])) for k in range(len(events))]
    assert contents.events == events[: sum(end <= at for end in ends)]
    assert (contents.fault is None) == (at in (0, *ends))


@given(st.lists(_events, min_size=1, max_size=4), st.data())
def test_a_changed_byte_is_noticed_and_costs_no_sound_record_before_it(
    events: list[Event], data: st.DataObject
) -> None:
    whole = bytearray(records.encode(events))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    contents = records.parse(bytes(whole))
    ends = [len(records.encode(events[: k + 1])) for k in range(len(events))]
    hit = sum(end <= at for end in ends)
    assert contents.events[:hit] == events[:hit]
    assert all(event in events for event in contents.events)
    # Only the name of the checksum's own key may change unnoticed: the record is then one without.
    assert contents.fault is not None or contents.events == events


def test_a_damaged_record_costs_only_itself() -> None:
    events = [Event((TENANT, b"q", b"p"), Frame(bytes(16), b"t%d" % k, b'{"a":1}'), 1) for k in range(3)]
    first, second, third = (records.encode([event]) for event in events)
    contents = records.parse(first + second.replace(b'"a":1', b'"a":2') + third)
    assert contents.events == [events[0], events[2]]
    assert contents.fault == "record 1: the checksum is wrong"


def test_a_wrong_length_ends_the_reading() -> None:
    events = [Event((TENANT, b"q", b"p"), Frame(bytes(16), b"t%d" % k, b"1"), 1) for k in range(3)]
    first, second, third = (records.encode([event]) for event in events)
    wrong = struct.pack("<I", len(second) - 7) + second[4:]
    assert records.parse(first + wrong + third).events == events[:1]
    assert records.parse(first + bytes(4096)).events == events[:1]


def test_records_of_the_oldest_form_are_read() -> None:
    body = b'{"queue":"orders","partition":"Default","transactionId":"t-1","encrypted":false,"payload":{"a":1}}'
    assert len(body) == 98
    (event,) = records.parse(struct.pack("<I", 98) + body).events
    assert event == Event((DEFAULT_TENANT, b"orders", b"Default"), Frame(b"", b"t-1", b'{"a":1}'))
    bare = b'{"queue":"q","partition":"p","transactionId":"t","payload":null,"later":[1]}'
    (event,) = records.parse(struct.pack("<I", len(bare)) + bare).events
    assert event.frame.payload == b"null"


def test_a_record_has_the_keys_in_their_order() -> None:
    event = Event((TENANT, b"q", b"p"), Frame(bytes(16), b"t", b'{"a" : 1}', subject=b"me", encrypted=True), 5)
    data = records.encode([event])
    body = data[4:]
    assert struct.unpack("<I", data[:4]) == (len(body),)
    assert list(msgspec.json.decode(body)) == (
        "tenant queue partition transactionId producerSub encrypted payload messageId ts crc".split()
    )
    assert b'"payload":{"a" : 1}' in body
