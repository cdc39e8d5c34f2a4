"""Keys from a key-set URL: a small real server, with rotation, faults and floods."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from jwt.algorithms import OKPAlgorithm, RSAAlgorithm

from queen.auth import keyset
from queen.auth.access import Access
from queen.auth.denied import Denied
from queen.auth.levels import Demand, Level
from queen.settings import Settings
from tests.auth.tokens import ed_key, rsa_key, token

READ = Demand(Level.READ_ONLY, scoped=True)
ONE, TWO, ED = rsa_key(), rsa_key(), ed_key()


class Provider(ThreadingHTTPServer):
    """An identity provider's key-set address."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.body: bytes = b'{"keys":[]}'
        self.status = 200
        self.asked = 0
        self.url = f"http://127.0.0.1:{self.server_port}/keys?x=1"

    def serve(self, *members: dict[str, Any]) -> None:
        self.body = json.dumps({"keys": members}).encode()


class _Handler(BaseHTTPRequestHandler):
    server: Provider

    def do_GET(self) -> None:
        self.server.asked += 1
        assert self.path == "/keys?x=1"
        self.send_response(self.server.status)
        if self.server.status == 302:
            self.send_header("Location", "/keys?x=1")
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_: Any) -> None:
        pass


def rsa_member(key: Any, kid: str | None = None, **more: Any) -> dict[str, Any]:
    member = RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
    return {**{k: v for k, v in member.items() if k != "key_ops"}, **({} if kid is None else {"kid": kid}), **more}


def ed_member(kid: str) -> dict[str, Any]:
    return {**OKPAlgorithm.to_jwk(ED.public_key(), as_dict=True), "kid": kid}


@pytest.fixture
def provider() -> Iterator[Provider]:
    with Provider() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def access_to(provider: Provider, algorithm: str = "RS256") -> Access:
    access = Access(Settings.read({"JWT_ENABLED": "1", "JWT_ALGORITHM": algorithm, "JWT_JWKS_URL": provider.url}))
    access.start()
    return access


def outcome(access: Access, text: str) -> str:
    try:
        access.check({"HTTP_AUTHORIZATION": text}, "/x", READ)
    except Denied as error:
        return f"{error.status} {error.message}"
    return "passes"


def good(key: Any, kid: str | None, algorithm: str = "RS256") -> str:
    return token(key, algorithm, None if kid is None else {"kid": kid}, role="read-only")


def test_tokens_are_checked_with_the_key_they_name(provider: Provider) -> None:
    provider.serve(rsa_member(ONE, "one"), rsa_member(TWO, "two"), ed_member("ed"), {"kty": "EC", "kid": "ec"}, 5)
    access = access_to(provider, "auto")
    assert outcome(access, good(ONE, "one")) == outcome(access, good(TWO, "two")) == "passes"
    assert outcome(access, good(ED, "ed", "EdDSA")) == "passes"
    assert outcome(access, good(TWO, "one")) == "401 Invalid token signature"
    assert outcome(access, good(ONE, "ed")) == "401 Unknown key ID"
    assert outcome(access, good(ONE, "ec")) == "401 Unknown key ID"


def test_a_token_that_names_no_key_needs_one_of_its_kind(provider: Provider) -> None:
    provider.serve(rsa_member(ONE, "one"), ed_member("ed"))
    assert outcome(access_to(provider, "auto"), good(ONE, None)) == "passes"
    provider.serve(rsa_member(ONE, "one"), rsa_member(TWO, "two"))
    assert outcome(access_to(provider), good(ONE, None)) == "401 Unknown key ID"


def test_a_keys_own_algorithm_and_use_are_honoured(provider: Provider) -> None:
    provider.serve(rsa_member(ONE, "one", alg="RS512"), rsa_member(TWO, "two", use="enc"))
    access = access_to(provider)
    assert outcome(access, good(ONE, "one", "RS512")) == "passes"
    assert outcome(access, good(ONE, "one")) == "401 Unknown key ID"
    assert outcome(access, good(TWO, "two")) == "401 Unknown key ID"


def test_a_new_key_is_fetched_and_a_withdrawn_one_forgotten(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider.serve(rsa_member(ONE, "one"))
    access = access_to(provider)
    old = good(ONE, "one")
    assert outcome(access, old) == "passes"
    provider.serve(rsa_member(TWO, "two"))
    assert outcome(access, good(TWO, "two")) == "401 Unknown key ID"  # fetched a moment ago
    monkeypatch.setattr(keyset, "_REFETCH_SECONDS", 0.0)
    assert outcome(access, good(TWO, "two")) == "passes"
    assert outcome(access, old) == "401 Unknown key ID"


def test_unknown_keys_dont_flood_the_provider(provider: Provider) -> None:
    provider.status = 500
    access = access_to(provider)
    for number in range(50):
        assert outcome(access, good(ONE, f"k{number}")) == "401 Unknown key ID"
    assert provider.asked <= 2  # at the start, and again after five seconds if this took so long


@pytest.mark.parametrize("fault", ["redirect", "too long", "no JSON", "no keys", "broken key"])
def test_faults_of_the_provider_leave_the_old_keys(
    provider: Provider, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyset, "_REFETCH_SECONDS", 0.0)
    provider.serve(rsa_member(ONE, "one"))
    access = access_to(provider)
    if fault == "redirect":
        provider.status = 302
    elif fault == "too long":
        provider.body = b'{"keys":[],"x":"' + b"x" * (1 << 20) + b'"}'
    elif fault == "no JSON":
        provider.body = b"<html>"
    elif fault == "no keys":
        provider.body = b"[]"
    else:
        provider.serve(rsa_member(ONE, "one"), {"kty": "RSA", "kid": "x", "n": 1, "e": "!"}, {"kty": "RSA", "kid": "y"})
    assert outcome(access, good(ONE, "x")) == "401 Unknown key ID"
    assert outcome(access, good(ONE, "one")) == "passes"


def test_a_silent_provider_is_given_up() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = Settings.read(
            {
                "JWT_ENABLED": "1",
                "JWT_ALGORITHM": "RS256",
                "JWT_JWKS_TIMEOUT_MS": "50",
                "JWT_JWKS_URL": f"http://127.0.0.1:{silent.getsockname()[1]}/",
            }
        )
        started = time.monotonic()
        access = Access(settings)
        access.start()
        assert outcome(access, good(ONE, "x")) == "401 Unknown key ID"
        assert time.monotonic() - started < 30
