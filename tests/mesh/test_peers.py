"""The peer list, entry by entry, and the allow-list."""

from __future__ import annotations

import gevent
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queen.mesh.peers import AllowList, Peer, parse_peers

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("queen-b", "queen-b", 6633),
        ("queen-b:7000", "queen-b", 7000),
        (" queen-b : 7000 ", "queen-b", 7000),
        ("http://queen-b:7000", "queen-b", 7000),
        ("https://queen-b", "queen-b", 6633),
        ("http://https://queen-b", "queen-b", 6633),
        ("http://queen-b:7000/", "queen-b", 7000),
        ("http://queen-b:7000/a/b", "queen-b", 7000),
        ("10.0.0.1:7000", "10.0.0.1", 7000),
        ("::1", "::1", 6633),
        ("fd00::12:34", "fd00::12:34", 6633),
        ("[::1]", "::1", 6633),
        ("[::1]:7000", "::1", 7000),
        ("queen-b:65535", "queen-b", 65535),
    ],
)
def test_an_entry_is_a_host_and_perhaps_a_port(text: str, host: str, port: int) -> None:
    assert parse_peers(text, 6633) == ([Peer(host, port)], [])


@pytest.mark.parametrize(
    "text", ["queen-b:abc", "queen-b:", "queen-b:70000", "queen-b:-1", "queen-b:7_0", "queen-b:\u0667"]
)
def test_a_port_that_is_none_is_the_default_and_warned_of(text: str) -> None:
    peers, warnings = parse_peers(text, 6633)
    assert peers == [Peer("queen-b", 6633)]
    assert len(warnings) == 1
    assert f'"{text}"' in warnings[0]


@pytest.mark.parametrize("text", ["queen-b:0", ":7000", "[]:7000", "http://:1"])
def test_what_cannot_be_dialled_is_skipped_and_warned_of(text: str) -> None:
    peers, warnings = parse_peers(text, 6633)
    assert peers == []
    assert len(warnings) == 1


@pytest.mark.parametrize("text", ["", " ", ",,", " , http:// ,"])
def test_nothing_is_nobody(text: str) -> None:
    assert parse_peers(text, 6633) == ([], [])


def test_each_peer_is_dialled_once_in_the_order_of_the_list() -> None:
    peers, _ = parse_peers("c,a:7000,c:6633, b ,a:7000", 6633)
    assert peers == [Peer("c", 6633), Peer("a", 7000), Peer("b", 6633)]


@given(st.text(max_size=60))
def test_any_list_is_read(text: str) -> None:
    peers, _ = parse_peers(text, 6633)
    assert all(peer.host and 0 < peer.port < 65536 for peer in peers)


def test_any_address_may_connect_unless_told_otherwise() -> None:
    assert AllowList("any", []).allows("203.0.113.7")


@pytest.mark.parametrize(
    ("rule", "address", "allowed"),
    [
        ("10.1.0.0/16", "10.1.2.3", True),
        ("10.1.0.0/16", "10.2.0.1", False),
        ("10.1.0.0/16", "::ffff:10.1.2.3", True),
        ("10.1.2.3", "10.1.2.3", True),
        ("10.1.2.3/16", "10.1.9.9", True),
        ("10.0.0.1, fd00::/8", "fd12::1%eth0", True),
        ("10.0.0.1, fd00::/8", "fe80::1", False),
        ("10.1.0.0/16", "nonsense", False),
    ],
)
def test_networks_may_connect(rule: str, address: str, allowed: bool) -> None:
    assert AllowList(rule, []).allows(address) is allowed


def test_peers_and_this_machine_may_connect() -> None:
    allow = AllowList("peers", [Peer("192.0.2.7", 6633), Peer("2001:db8::7", 6633)])
    assert allow.allows("127.0.0.1")
    assert allow.allows("::1")
    allow.refresh()
    assert allow.allows("192.0.2.7")
    assert allow.allows("::ffff:192.0.2.7")
    assert allow.allows("2001:db8:0::7")
    assert not allow.allows("192.0.2.8")


def test_a_peer_that_was_not_looked_up_yet_is_let_in_when_it_tries_again() -> None:
    allow = AllowList("peers", [Peer("192.0.2.7", 6633)])
    assert not allow.allows("192.0.2.7")
    with gevent.Timeout(20):
        while not allow.allows("192.0.2.7"):
            gevent.sleep(0.01)


def test_a_name_that_cannot_be_looked_up_keeps_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    allow = AllowList("peers", [Peer("192.0.2.7", 6633)])
    allow.refresh()

    def fail(*_: object, **__: object) -> None:
        raise OSError("no resolver")

    monkeypatch.setattr("queen.mesh.peers.socket.getaddrinfo", fail)
    allow.refresh()
    assert allow.allows("192.0.2.7")
