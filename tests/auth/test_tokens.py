"""What a verifier takes and what it refuses, and with which words."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queen.auth.access import Access
from queen.auth.denied import Denied
from queen.auth.levels import Demand, Level
from queen.auth.tokens import Verifier
from queen.settings import Settings
from tests.auth.tokens import SECRET, confused, ed_key, pem, raw_claims, rsa_key, token, unsigned

RSA, OTHER_RSA, ED = rsa_key(), rsa_key(), ed_key()
PUSH = Demand(Level.WRITE_ONLY, scoped=True)


def configured(algorithm: str = "HS256", **more: str) -> Settings:
    environ = {"JWT_ENABLED": "1", "JWT_ALGORITHM": algorithm, "JWT_SECRET": SECRET, **more}
    return Settings.read(environ)


def verifier(algorithm: str = "HS256", **more: str) -> Verifier:
    return Verifier(configured(algorithm, **more), None)


def refusal(checker: Verifier, text: str) -> tuple[int, str]:
    with pytest.raises(Denied) as caught:
        checker.verify(text)
    return caught.value.status, caught.value.message


KEYS: dict[str, Any] = {"HS": SECRET, "RS": RSA, "Ed": ED}
ALL = ("HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "EdDSA")


@pytest.mark.parametrize("configured_as", [*ALL, "auto"])
def test_accepts_the_algorithms_of_its_setting_and_no_other(configured_as: str) -> None:
    accepted = {"RS256": {"RS256", "RS384", "RS512"}, "auto": set(ALL)}.get(configured_as, {configured_as})
    for algorithm in ALL:
        public = pem(ED if algorithm == "EdDSA" else RSA).decode()
        checker = verifier(configured_as, JWT_PUBLIC_KEY=public)
        text = token(KEYS[algorithm[:2]], algorithm, role="admin")
        if algorithm in accepted:
            assert checker.verify(text)["role"] == "admin"
        else:
            assert refusal(checker, text) == (401, "Unsupported token algorithm")


@pytest.mark.parametrize("algorithm", ["none", "None", "NONE", "nOnE", "", "hs256", "ES256", "PS256", "Ed448"])
@pytest.mark.parametrize("configured_as", ["HS256", "RS256", "auto"])
def test_never_takes_other_algorithms(configured_as: str, algorithm: str) -> None:
    checker = verifier(configured_as, JWT_PUBLIC_KEY=pem(RSA).decode())
    assert refusal(checker, unsigned({"alg": algorithm}, role="admin")) == (401, "Unsupported token algorithm")


@pytest.mark.parametrize("alg", [None, 1, ["HS256"], {"a": 1}, True])
def test_an_algorithm_that_is_no_text_is_refused(alg: Any) -> None:
    assert refusal(verifier("auto"), unsigned({"alg": alg}))[0] == 401


def test_a_public_key_is_never_an_hmac_secret() -> None:
    for key in (RSA, ED):
        for text in (pem(key), pem(key).strip()):
            checker = verifier("auto", JWT_PUBLIC_KEY=pem(key).decode())
            assert refusal(checker, confused(text, role="admin")) == (401, "Invalid token signature")
            only_public = verifier("auto", JWT_PUBLIC_KEY=pem(key).decode(), JWT_SECRET="")
            assert refusal(only_public, confused(text, role="admin")) == (500, "HS secret not configured")


def test_a_signature_of_another_key_is_refused() -> None:
    assert refusal(verifier(), token("another secret " * 4)) == (401, "Invalid token signature")
    checker = verifier("RS256", JWT_PUBLIC_KEY=pem(RSA).decode())
    assert refusal(checker, token(OTHER_RSA, "RS256")) == (401, "Invalid token signature")
    head, claims, signature = token(role="read-only").split(".")
    other = token(role="admin").split(".")[1]
    assert refusal(verifier(), f"{head}.{other}.{signature}") == (401, "Invalid token signature")
    assert refusal(verifier(), f"{head}.{claims}.") == (401, "Invalid token signature")


def test_keys_that_are_none_are_told_as_the_brokers_fault() -> None:
    assert refusal(verifier("RS256", JWT_PUBLIC_KEY="x"), token(RSA, "RS256")) == (500, "invalid RSA public key PEM")
    assert refusal(verifier("EdDSA", JWT_PUBLIC_KEY="x"), token(ED, "EdDSA")) == (500, "invalid Ed public key PEM")
    wrong_family = verifier("auto", JWT_PUBLIC_KEY=pem(ED).decode())
    assert refusal(wrong_family, token(RSA, "RS256")) == (401, "Unsupported token algorithm")


# Five seconds of room: the machine may be slow between making the token and judging it.
@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ({"exp": -25}, None),
        ({"exp": -36}, "Token has expired"),
        ({"exp": -36.5}, "Token has expired"),
        ({"nbf": 25}, None),
        ({"nbf": 60}, "Token not yet valid"),
        ({"iat": 25}, None),
        ({"iat": 60}, "Token issued in the future"),
    ],
)
def test_times_hold_within_the_skew(claims: dict[str, float], message: str | None) -> None:
    text = raw_claims(json.dumps({name: time.time() + value for name, value in claims.items()}).encode())
    if message is None:
        assert verifier().verify(text)
    else:
        assert refusal(verifier(), text) == (401, message)


@pytest.mark.parametrize("value", ['"4102444800"', "null", "true", "[]", "{}", "NaN", "Infinity", "1e999", '"never"'])
@pytest.mark.parametrize("claim", ["exp", "nbf", "iat"])
def test_a_time_that_is_no_number_is_refused(claim: str, value: str) -> None:
    text = raw_claims(b'{"%s":%s}' % (claim.encode(), value.encode()))
    assert refusal(verifier(), text) == (401, "Invalid token claims")


def test_issuer_and_audience_are_checked_when_they_are_set() -> None:
    assert verifier().verify(token(iss="x", aud="y"))
    strict = verifier(JWT_ISSUER="us", JWT_AUDIENCE="queen")
    for aud in ("queen", ["a", "queen"]):
        assert strict.verify(token(iss="us", aud=aud))
    for wrong in ({}, {"iss": "them"}, {"iss": ["us"]}):
        assert refusal(
            strict,
            token(aud="queen", **wrong) if wrong != {"iss": ["us"]} else raw_claims(b'{"iss":["us"],"aud":"queen"}'),
        ) == (401, "Invalid token issuer")
    for aud in ("queens", ["a"], [], {"queen": 1}, None):
        text = raw_claims(json.dumps({"iss": "us", "aud": aud}).encode())
        assert refusal(strict, text) == (401, "Invalid token audience")


def test_a_token_without_end_is_refused_on_demand() -> None:
    assert verifier().verify(raw_claims(b"{}")) == {}
    assert refusal(verifier(JWT_REQUIRE_EXP="1"), raw_claims(b"{}")) == (401, "Invalid token claims")


@pytest.mark.parametrize("payload", [b"", b"1", b"[]", b"null", b"{", b"\xff", b"[" * 5000, b'{"a":' * 3000])
def test_claims_that_are_no_object_are_refused(payload: bytes) -> None:
    assert refusal(verifier(), raw_claims(payload)) == (401, "Invalid token claims")


def encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


headers = st.one_of(
    st.binary(max_size=60),
    st.dictionaries(
        st.sampled_from(["alg", "kid", "crit", "b64", "typ", "jwk", "jku", "x5c"]),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.text(max_size=8),
            st.lists(st.text(max_size=4)),
            st.sampled_from([*ALL, "none"]),
        ),
    ).map(lambda value: json.dumps(value).encode()),
)


@settings(max_examples=400, deadline=None)
@given(
    header=headers,
    payload=st.binary(max_size=60),
    signature=st.binary(max_size=70),
    form=st.integers(0, 3),
    noise=st.text(max_size=40),
)
def test_no_forged_token_passes_or_breaks_anything(
    header: bytes, payload: bytes, signature: bytes, form: int, noise: str
) -> None:
    text = [
        f"{encoded(header)}.{encoded(payload)}.{encoded(signature)}",
        noise,
        f"{noise}.{encoded(payload)}.",
        "." * (form + len(noise)),
    ][form]
    for checker in CHECKERS:
        with pytest.raises(Denied) as caught:
            checker.check({"HTTP_AUTHORIZATION": f"Bearer {text}"}, "/api/v1/push", PUSH)
        assert caught.value.status == 401


CHECKERS = [
    Access(configured("auto", JWT_PUBLIC_KEY=pem(RSA).decode())),
    Access(configured("EdDSA", JWT_PUBLIC_KEY=pem(ED).decode())),
]


def test_roles_come_from_both_claims_under_their_names() -> None:
    access = Access(configured(JWT_ROLES_CLAIM="r", JWT_ROLES_ARRAY_CLAIM="rs", JWT_ROLE_WRITE_ONLY="producer"))

    def passes(**claims: Any) -> bool:
        try:
            access.check({"HTTP_AUTHORIZATION": token(**claims)}, "/api/v1/push", PUSH)
        except Denied as error:
            assert (error.status, error.message) == (403, "Insufficient permissions")
            return False
        return True

    assert passes(r="producer") and passes(rs=["x", "producer", 1, None, {}]) and passes(r="admin")
    assert not passes(role="admin") and not passes(r=["producer"]) and not passes(rs="producer")
    assert not passes(r="write-only") and not passes() and not passes(r="") and not passes(r="Producer")


def test_a_remembered_token_still_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    access = Access(configured())
    environ = {"HTTP_AUTHORIZATION": f"bEaReR {token(role='admin', sub='me')}"}
    first = access.check(environ, "/api/v1/push", PUSH)
    assert first is not None and first.subject == b"me"
    assert access.check(environ, "/api/v1/push", PUSH) is first
    late = time.time() + 3600 + 32
    monkeypatch.setattr(time, "time", lambda: late)
    with pytest.raises(Denied, match="Token has expired"):
        access.check(environ, "/api/v1/push", PUSH)


@pytest.mark.parametrize("sub", ["a\\u0000b", "\\ud800"])
def test_a_subject_that_no_column_takes_is_refused(sub: str) -> None:
    text = raw_claims(b'{"role":"admin","sub":"%s"}' % sub.encode())
    with pytest.raises(Denied, match="Invalid token claims"):
        Access(configured()).check({"HTTP_AUTHORIZATION": text}, "/api/v1/push", PUSH)


def test_skipped_paths_match_exactly_or_below_a_slash() -> None:
    access = Access(configured(JWT_SKIP_PATHS=" /a , /b/ ,, / "))
    for path in ("/a", "/b/", "/b/c", "/"):
        assert access.check({}, path, PUSH) is None
    for path in ("/a/", "/ab", "/b", "//", "/%61", "/B/c"):
        with pytest.raises(Denied, match="Authentication required"):
            access.check({}, path, PUSH)
