"""The handshake: the documented vector, who gets in and who doesn't, and that a HELLO works once.

What a strict listener asks for besides comes last.
"""

from __future__ import annotations

import hmac
import json
import secrets
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queen.mesh.frames import Tag, encode
from queen.mesh.hello import Doorkeeper, Hello, Refused, ReplayGuard, hello, mac, signed_hello
from queen.mesh.seals import SealCheck

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


# Signed as a whole

NAMES = ("queen-b:6633", "10.0.0.2:6633")


def signed(secret: bytes = SECRET, **changes: Any) -> bytes:
    """The payload of a signed HELLO, whose signature covers the changes unless that is changed itself."""
    value: dict[str, Any] = {
        "server_id": "queen-a",
        "nonce": secrets.token_hex(16),
        "instance": "0123456789abcdef",
        "ts": int(time.time()),
        "to": "queen-b:6633",
    } | changes
    value.setdefault("mac", mac(secret, value["nonce"]))
    lines = ["queen-mesh-2", *(str(value[name]) for name in ("nonce", "server_id", "instance", "ts", "to"))]
    value.setdefault("mac2", hmac.new(secret, "\n".join(lines).encode(), "sha256").hexdigest())
    return json.dumps({name: text for name, text in value.items() if text is not ...}).encode()


def keeper(strict: bool = True, **options: Any) -> Doorkeeper:
    return Doorkeeper([SECRET], strict=strict, **options)


def test_what_this_version_signs() -> None:
    frame, sealer = signed_hello("queen-a", "0123456789abcdef", SECRET, "queen-b:6633")
    value = json.loads(frame[5:])
    assert set(value) == {"server_id", "nonce", "mac", "instance", "ts", "to", "mac2"}
    assert json.loads(signed(**{name: value[name] for name in ("nonce", "ts")})) == value
    who = keeper(names=NAMES).admit(Tag.HELLO, frame[5:])
    assert (who.server_id, who.instance, who.signed) == ("queen-a", "0123456789abcdef", True)
    beat = sealer.seal(encode(Tag.HEARTBEAT))
    SealCheck(who.seal_key).check(beat[4], beat[5:])


def test_a_compatible_listener_takes_the_signed_and_the_unsigned_and_asks_for_no_seals() -> None:
    lenient = keeper(strict=False)
    assert admitted(lenient, signed()) == Hello("queen-a", "0123456789abcdef", signed=True)
    assert admitted(lenient, payload()) == Hello("queen-a")
    assert admitted(Doorkeeper(), signed(mac2="x")) == Hello("queen-a", "0123456789abcdef")


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mac2": "0" * 64}, "wrong mac2"),
        ({"mac2": ""}, "wrong mac2"),
        ({"mac2": 7}, "not all that it signs"),
        ({"to": 7}, "not all that it signs"),
        ({"to": "a\nb"}, "not all that it signs"),
        ({"server_id": "a\nb"}, "not all that it signs"),
        ({"ts": "1756540800"}, "not all that it signs"),
        ({"ts": 1756540800.0}, "not all that it signs"),
        ({"ts": True}, "not all that it signs"),
        ({"ts": -1}, "s ago: was it recorded, or is a clock wrong"),
        ({"ts": 10**400}, "s ahead"),
    ],
)
def test_a_signature_that_is_not_quite_right_is_refused_by_every_listener(
    strict: bool, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        admitted(keeper(strict), signed(**changes))


@given(st.sampled_from(["server_id", "instance", "to", "ts", "nonce"]))
def test_whatever_is_signed_can_not_be_changed(name: str) -> None:
    value = json.loads(signed())
    changed = value[name] + 1 if name == "ts" else value[name][:-1] + "z"
    value |= {name: changed, "mac": mac(SECRET, changed) if name == "nonce" else value["mac"]}
    with pytest.raises(Refused, match="wrong mac2"):
        admitted(keeper(False), json.dumps(value).encode())


@pytest.mark.parametrize(("late", "works"), [(59, True), (-59, True), (65, False), (-65, False), (3600, False)])
def test_a_hello_is_good_for_a_minute(late: int, works: bool) -> None:
    said = signed(ts=int(time.time()) - late)
    for strict in (True, False):
        if works:
            admitted(keeper(strict), said)
        else:
            with pytest.raises(Refused, match="was it recorded, or is a clock wrong"):
                admitted(keeper(strict), said)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mac2": ...}, "HELLO without mac2, which QUEEN_MESH_STRICT asks for"),
        ({"nonce": "0" * 31}, "nonce"),
        ({"nonce": "0" * 31 + "A"}, "nonce"),
        ({"to": "queen-c:6633"}, "HELLO for queen-c:6633, which is not in QUEEN_MESH_NAMES"),
        ({"to": "queen-b"}, "QUEEN_MESH_NAMES"),
        ({"to": "queen-b:7000"}, "QUEEN_MESH_NAMES"),
    ],
)
def test_a_strict_listener_asks_for_more(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        admitted(keeper(names=NAMES), signed(**changes))
    admitted(keeper(False, names=NAMES), signed(**changes))


def test_a_strict_listener_without_names_takes_any_and_knows_names_in_any_case() -> None:
    admitted(keeper(), signed(to="[::1]:1"))
    admitted(keeper(names=NAMES), signed(to="Queen-B:6633"))


def test_a_signed_hello_works_once_and_one_that_was_refused_costs_nothing() -> None:
    strict = keeper(names=NAMES)
    said = json.loads(signed())
    with pytest.raises(Refused):
        admitted(strict, json.dumps(said | {"to": "queen-c:6633"}).encode())
    admitted(strict, json.dumps(said).encode())
    with pytest.raises(Refused, match="used before"):
        admitted(strict, json.dumps(said).encode())
    assert strict.replays == 1


def test_seals_are_of_the_secret_that_the_dialler_has() -> None:
    both = Doorkeeper([b"new", SECRET], strict=True)
    frame, sealer = signed_hello("queen-a", "i", SECRET, "b:1")
    who = both.admit(Tag.HELLO, frame[5:])
    beat = sealer.seal(encode(Tag.HEARTBEAT))
    SealCheck(who.seal_key).check(beat[4], beat[5:])


@pytest.mark.parametrize("secret", [SECRET, b""])
def test_only_ids_that_are_allowed_get_in(secret: bytes) -> None:
    picky = Doorkeeper([secret], ids=["queen-b", "queen-c"])
    assert admitted(picky, own(secret)).server_id == "queen-b"
    with pytest.raises(Refused, match="server id queen-x is not in QUEEN_MESH_ALLOWED_IDS"):
        admitted(picky, hello("queen-x", "", secret)[5:])
