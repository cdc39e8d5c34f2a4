"""Signing in, sessions and their end, and what a session may do on the data plane."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import pytest

from tests.broker import Response, wait_until
from tests.proxy.conftest import Stack
from tests.proxy.person import PEOPLE, Person

EMAIL = "ops@acme.example"


@pytest.fixture(scope="module")
def people(stack: Stack) -> Iterator[Stack]:
    """The stack with a proxy that people can sign in to, and a second tenant, globex."""
    stack.proxy.stop()
    stack.proxy.start(PEOPLE)
    stack.control.bootstrap("globex")
    yield stack


@pytest.fixture
def visitor(people: Stack) -> Person:
    return Person(people.proxy)


@pytest.fixture
def admin(visitor: Person) -> Person:
    """The admin of acme, signed in."""
    assert visitor.sign_in(EMAIL).status == 303
    return visitor


def test_a_session_from_its_start_to_its_end(visitor: Person) -> None:
    signed_in = visitor.sign_in(EMAIL, next="/console/c/acme-prod")
    assert (signed_in.status, signed_in.headers["Location"]) == (303, "/console/c/acme-prod")
    cookie = signed_in.headers["Set-Cookie"]
    assert cookie.endswith("; Path=/; HttpOnly; SameSite=Lax; Max-Age=86400")
    me = visitor.get("/auth/me").json()
    assert (me["email"], me["tenant_slug"], me["acting_cluster"]["slug"]) == (EMAIL, "acme", "acme-prod")
    assert [(cluster["slug"], cluster["role"]) for cluster in me["clusters"]] == [("acme-prod", "admin")]
    assert visitor.get("/").status == 200
    copied = visitor.cookie
    out = visitor.request("POST", "/auth/logout")
    assert (out.status, out.body) == (200, b'{"ok":true}')
    assert "Max-Age=0" in out.headers["Set-Cookie"]
    visitor.cookie = copied
    ended = visitor.get("/auth/me")
    assert (ended.status, ended.json()["error"]) == (401, "session no longer valid")
    assert visitor.get("/").status == 302


def test_logout_is_well_without_a_session(visitor: Person) -> None:
    assert visitor.request("POST", "/auth/logout").body == b'{"ok":true}'
    visitor.cookie = "nonsense"
    assert visitor.request("POST", "/auth/logout").status == 200


def test_a_person_who_is_gone_has_no_session(people: Stack, visitor: Person) -> None:
    people.control.bootstrap("vanished")
    visitor.sign_in("ops@vanished.example")
    people.control.sql.execute("DELETE FROM queen_proxy.users WHERE email = 'ops@vanished.example'")
    assert visitor.get("/auth/me").json()["error"] == "session no longer valid"
    assert visitor.get("/api/v1/resources/queues", x_queen_act_cluster="acme-prod").status in (401, 403)
    assert visitor.request("POST", "/auth/logout").body == b'{"ok":true}'


@pytest.mark.parametrize(
    ("email", "password"),
    [(EMAIL, "wrong"), ("nobody@acme.example", "wrong"), ("", ""), ("\x00", "x" * 5000), (EMAIL, "\udcff\x00")],
)
def test_every_wrong_attempt_has_one_answer(visitor: Person, email: str, password: str) -> None:
    response = visitor.post(
        "/auth/login", {"email": email, "password": password.encode("utf-8", "surrogateescape"), "next": "/"}
    )
    assert response.status == 401
    assert "Invalid email or password." in response.body.decode()
    assert not visitor.cookie


def test_the_password_of_sql_becomes_argon2id(people: Stack, visitor: Person) -> None:
    people.control.bootstrap("initech")
    query = "SELECT password_hash FROM queen_proxy.users WHERE email = 'ops@initech.example'"
    assert not people.control.one(query).startswith("$argon2id$")
    for _ in range(2):
        assert visitor.sign_in("OPS@initech.example ").status == 303
        assert people.control.one(query).startswith("$argon2id$")
    assert visitor.sign_in("ops@initech.example", "initial-passwore").status == 401


def test_sign_in_is_throttled_for_each_address(visitor: Person, people: Stack) -> None:
    statuses = [visitor.sign_in("nobody@acme.example", "wrong").status for _ in range(11)]
    assert statuses == [401] * 10 + [429]
    refused = visitor.sign_in(EMAIL)
    assert (refused.status, refused.json()["error"]) == (429, "too many login attempts")
    assert 1 <= int(refused.headers["Retry-After"]) <= 61
    assert Person(people.proxy).sign_in(EMAIL).status == 303


@pytest.mark.parametrize(
    "target", ["//evil.example", "/\\evil.example", "https://evil.example", "evil", "/a\r\nX: y", ""]
)
def test_next_stays_on_this_host(visitor: Person, target: str) -> None:
    assert visitor.sign_in(EMAIL, next=target).headers["Location"] == "/"


def test_forms_of_other_sites_are_refused(admin: Person) -> None:
    assert Person(admin.proxy).post("/auth/login", {"email": EMAIL}, Sec_Fetch_Site="cross-site").status == 403
    origin = {"Sec_Fetch_Site": "", "Origin": "https://evil.example"}
    assert Person(admin.proxy).post("/auth/login", {"email": EMAIL}, **origin).status == 403
    path = "/console/c/acme-prod/keys"
    form = {"name": "stolen", "scopes": "admin"}
    assert admin.post(path, form).status == 403
    other = Person(admin.proxy)
    other.sign_in(EMAIL)
    assert admin.post(path, form | {"token": other.token()}).status == 403
    assert admin.post(path, form | {"token": admin.token()}, Sec_Fetch_Site="same-site").status == 403


def test_pages_lead_to_the_sign_in_and_tell_nothing(visitor: Person, people: Stack) -> None:
    for path in ("/", "/console", "/console/c/acme-prod", "/console/c/nonesuch", "/console/operator/cells", "/x?y=z"):
        response = visitor.get(path)
        assert response.status == 302, path
        assert response.headers["Location"].startswith("/auth/login?next=%2F")
        assert response.headers["Cache-Control"] == "no-store"
    # A key is no session.
    assert visitor.get("/", Authorization=f"Bearer {people.acme.key}").status == 302


def test_answers_carry_the_headers_that_protect_them(admin: Person) -> None:
    for path in ("/auth/login", "/console/c/acme-prod", "/auth/me"):
        headers = admin.get(path).headers
        assert "script-src 'self'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"


def test_a_navigation_has_no_credential_on_the_api(admin: Person) -> None:
    assert admin.get("/api/v1/resources/queues").status == 200
    assert admin.get("/api/v1/resources/queues", Sec_Fetch_Mode="Navigate").status == 401
    assert admin.get("/api/console/overview", Sec_Fetch_Mode="navigate").status == 401


def test_a_role_rules_on_the_data_plane(people: Stack, admin: Person) -> None:
    item = {"items": [{"queue": "roles", "payload": 1}]}
    assert admin.request("POST", "/api/v1/push", item).status == 201
    people.control.sql.execute(
        "SELECT queen_proxy.create_user("
        "%s, 'viewer@acme.example', queen_proxy.hash_password('initial-password'), 'local')",
        (people.acme.tenant_id,),
    )
    people.control.sql.execute(
        "SELECT queen_proxy.grant_cluster_role(%s, 'viewer@acme.example', 'viewer')", (people.acme.cluster_id,)
    )
    viewer = Person(people.proxy)
    viewer.sign_in("viewer@acme.example")
    assert viewer.get("/api/v1/resources/queues").status == 200
    assert viewer.request("POST", "/api/v1/push", item).status == 403
    assert viewer.get("/console/c/acme-prod/queues").status == 200
    assert viewer.get("/console/c/acme-prod/keys").status == 403


def test_a_session_of_another_tenant_opens_nothing(people: Stack) -> None:
    stranger = Person(people.proxy)
    stranger.sign_in("ops@globex.example")
    assert stranger.get("/api/v1/resources/queues").status == 403
    assert stranger.get("/api/console/overview").status == 403
    known, unknown = stranger.get("/console/c/acme-prod"), stranger.get("/console/c/nonesuch")
    assert known.status == unknown.status == 403
    assert known.body == unknown.body


def test_acting_as_a_cluster(people: Stack, admin: Person) -> None:
    assert admin.get("/api/v1/resources/queues", Host="localhost", x_queen_act_cluster="acme-prod").status == 200
    assert admin.get("/api/v1/resources/queues", Host="localhost", x_queen_act_cluster="globex-prod").status == 403


def test_a_session_token_ends_with_its_session(admin: Person) -> None:
    answer = admin.get("/auth/session-token").json()
    assert answer["expires_in"] == 900
    program = Person(admin.proxy)
    bearer = f"Bearer {answer['token']}"
    assert program.get("/api/console/overview", Authorization=bearer).status == 200
    admin.request("POST", "/auth/logout")
    assert program.get("/api/console/overview", Authorization=bearer).status == 401


def test_a_token_that_was_changed_is_refused(admin: Person) -> None:
    head, claims, signature = admin.cookie.split(".")
    decoded = json.loads(base64.urlsafe_b64decode(claims + "=="))
    forged = base64.urlsafe_b64encode(json.dumps(decoded | {"role": "admin"}).encode()).rstrip(b"=").decode()
    unsigned = base64.urlsafe_b64encode(b'{"alg":"none","typ":"JWT"}').rstrip(b"=").decode()
    for cookie in (f"{head}.{forged}.{signature}", f"{unsigned}.{claims}.", "a.b.c", "qk_live_x", "\xff"):
        admin.cookie = cookie
        response: Response = admin.get("/auth/me")
        assert response.status == 401, cookie


def test_other_ways_to_sign_in_are_not_configured(visitor: Person) -> None:
    for path in ("/auth/google", "/auth/github/callback"):
        response = visitor.get(path)
        assert (response.status, response.json()["code"]) == (404, "not_configured")
    assert visitor.get("/.well-known/jwks.json").json() == {"keys": []}


def test_operators_see_the_cell_and_act_as_a_tenant(people: Stack, admin: Person) -> None:
    assert admin.get("/console/operator/cells").status == 404
    people.control.bootstrap("hooli")
    people.control.sql.execute("SELECT queen_proxy.set_operator('ops@hooli.example', true)")
    operator = Person(people.proxy, "localhost")
    operator.sign_in("ops@hooli.example")
    for page, shown in (("tenants", "globex-prod"), ("cells", "http://127.0.0.1"), ("plans", "dedicated-s")):
        body = operator.get(f"/console/operator/{page}").body.decode()
        assert shown in body
    assert "You act as" in operator.get("/console/c/globex-prod").body.decode()
    assert operator.get("/auth/me").json()["operator_live"] is True
    assert operator.get("/api/v1/resources/queues", x_queen_act_cluster="globex-prod").status == 200


def test_sessions_outlive_a_restart_of_the_proxy(people: Stack, admin: Person) -> None:
    people.proxy.restart()
    assert admin.get("/auth/me").status == 200
    wait_until(lambda: admin.get("/console/c/acme-prod/queues").status == 200, 30, "queues after the restart")
