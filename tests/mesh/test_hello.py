"""The handshake: the documented vector, who gets in and who doesn't, and that a HELLO works once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queen.mesh.frames import Tag
from queen.mesh.hello import Doorkeeper, Hello, Refused, ReplayGuard, hello, mac

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

SECRET = b"s3cr3t"
NONCE = "00112233445566778899aabbccddeeff"
MAC = "04285856936ba6c4fc65577dc6ad15b5943a484aa62a3c4ad2a026ee53d3617a"
VECTOR = {"server_id": "queen-a", "nonce": NONCE, "mac": MAC}


def payload(**changes: Any) -> bytes:
    return json.dumps({name: value for name, value in {**VECTOR, **changes}.items() if value is not ...}).encode()


def admitted(keeper: Doorkeeper, data: bytes) -> Hello:
    return keeper.admit(Tag.HELLO, data)


def own(secret: bytes) -> bytes:
    """The payload of a HELLO that this version sends."""
    return hello("queen-b", "0123456789abcdef", secret)[5:]


def test_the_documented_vector() -> None:
    assert mac(SECRET, NONCE) == MAC
    assert admitted(Doorkeeper([SECRET]), payload()) == Hello("queen-a")


def test_what_this_version_sends() -> None:
    frame = hello("queen-b", "0123456789abcdef", SECRET)
    assert frame[4] == 4
    value = json.loads(frame[5:])
    assert set(value) == {"server_id", "nonce", "mac", "instance"}
    assert value["nonce"] == bytes.fromhex(value["nonce"]).hex()
    assert len(value["nonce"]) == 32
    assert value["mac"] == mac(SECRET, value["nonce"])
    assert json.loads(own(b""))["mac"] == ""
    assert json.loads(own(SECRET))["nonce"] != value["nonce"]


@pytest.mark.parametrize(
    ("dialler", "listener", "works"),
    [(b"", b"", True), (SECRET, b"", True), (b"", SECRET, False), (SECRET, SECRET, True), (b"other", SECRET, False)],
)
def test_both_ends_must_agree_unless_the_listener_is_open(dialler: bytes, listener: bytes, works: bool) -> None:
    keeper = Doorkeeper([listener])
    if works:
        assert admitted(keeper, own(dialler)) == Hello("queen-b", "0123456789abcdef")
    else:
        with pytest.raises(Refused):
            admitted(keeper, own(dialler))


def test_a_secret_can_be_replaced_broker_by_broker() -> None:
    keeper = Doorkeeper([b"new", SECRET])
    assert admitted(keeper, own(b"new")).server_id == "queen-b"
    assert admitted(keeper, own(SECRET)).server_id == "queen-b"
    with pytest.raises(Refused):
        admitted(keeper, own(b"older"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{",
        payload(server_id=...),
        payload(server_id=""),
        payload(server_id=7),
        payload(nonce=...),
        payload(nonce=7),
        payload(nonce="\ud800"),
        payload(mac=...),
        payload(mac=""),
        payload(mac=MAC[:-1]),
        payload(mac=MAC[:-2] + "zz"),
        payload(mac=" " + MAC[1:]),
        payload(mac=MAC + "00"),
        payload(mac="0" * 64),
        payload(nonce=NONCE.upper()),
    ],
)
def test_a_hello_that_is_not_quite_right_is_refused(data: bytes) -> None:
    with pytest.raises(Refused):
        admitted(Doorkeeper([SECRET]), data)


def test_what_is_not_said_to_matter_does_not() -> None:
    assert admitted(Doorkeeper([SECRET]), payload(mac=MAC.upper(), http_addr="h:1", more=[1])).server_id == "queen-a"
    assert admitted(Doorkeeper(), payload(nonce=None, mac=7)).server_id == "queen-a"


@pytest.mark.parametrize("tag", [tag for tag in Tag if tag is not Tag.HELLO] + [0, 99])
def test_the_first_frame_is_a_hello(tag: int) -> None:
    with pytest.raises(Refused):
        Doorkeeper().admit(tag, payload())


def test_a_hello_works_once() -> None:
    keeper = Doorkeeper([SECRET])
    first, second = own(SECRET), own(SECRET)
    admitted(keeper, first)
    admitted(keeper, second)
    for replay in (first, second, first):
        with pytest.raises(Refused, match="used before"):
            admitted(keeper, replay)
    assert keeper.replays == 3


def test_a_forged_hello_does_not_spoil_a_nonce() -> None:
    keeper = Doorkeeper([SECRET])
    with pytest.raises(Refused):
        admitted(keeper, payload(mac="0" * 64))
    admitted(keeper, payload())


def test_the_guard_can_only_log_or_be_off() -> None:
    for guard, counted in ((ReplayGuard.LOG, 1), (ReplayGuard.OFF, 0)):
        keeper = Doorkeeper([SECRET], guard)
        assert not admitted(keeper, payload()).replayed
        assert admitted(keeper, payload()).replayed is bool(counted)
        assert keeper.replays == counted


def test_an_open_listener_guards_nothing() -> None:
    keeper = Doorkeeper()
    admitted(keeper, payload())
    admitted(keeper, payload())
    assert keeper.replays == 0


@given(
    st.dictionaries(
        st.sampled_from(["server_id", "nonce", "mac", "instance", "x"]),
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=70), st.lists(st.integers(), max_size=2)),
    )
)
def test_nobody_gets_in_by_luck(value: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        admitted(Doorkeeper([SECRET]), json.dumps(value).encode())
