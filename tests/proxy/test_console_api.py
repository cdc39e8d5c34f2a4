"""The console's API and the forms behind its pages: keys, members, invitations, usage."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.broker import wait_until
from tests.proxy.conftest import Stack
from tests.proxy.person import PEOPLE, Person

EMAIL = "ops@acme.example"
ITEM = {"items": [{"queue": "orders", "partition": "customer-42", "payload": {"hello": "world"}}]}


@pytest.fixture(scope="module")
def people(stack: Stack) -> Iterator[Stack]:
    """The stack with a proxy that people can sign in to, and a second tenant, globex."""
    stack.proxy.stop()
    stack.proxy.start(PEOPLE)
    stack.control.bootstrap("globex")
    yield stack


@pytest.fixture
def admin(people: Stack) -> Person:
    person = Person(people.proxy)
    assert person.sign_in(EMAIL).status == 303
    return person


def _push(people: Stack, key: str) -> int:
    return people.request("POST", "/api/v1/push", ITEM, Authorization=f"Bearer {key}").status


def test_a_key_is_made_used_and_revoked(people: Stack, admin: Person) -> None:
    made = admin.request("POST", "/api/console/keys", {"name": "worker", "scopes": ["produce"]}).json()
    assert set(made) == {"id", "key"}
    assert re.fullmatch(r"qk_live_[A-Za-z0-9_-]{43}", made["key"])
    assert _push(people, made["key"]) == 201
    listed = admin.get("/api/console/keys")
    assert b"key_hash" not in listed.body and made["key"].encode() not in listed.body
    first = listed.json()[0]
    assert set(first) == {"id", "name", "scopes", "created_at", "last_used_at", "revoked_at"}
    assert (first["id"], first["scopes"], first["revoked_at"]) == (made["id"], ["produce"], None)
    revoked = admin.request("DELETE", f"/api/console/keys/{made['id']}", Content_Type="application/json")
    assert revoked.json() == {"ok": True}
    wait_until(lambda: _push(people, made["key"]) == 401, 5, "the revoked key is refused")
    again = admin.request("DELETE", f"/api/console/keys/{made['id']}", Content_Type="application/json")
    assert (again.status, again.json()["error"]) == (404, "no such active api key on this cluster")
    actions = people.control.sql.execute(
        "SELECT action, actor FROM queen_proxy.operations WHERE target = %s", (made["id"],)
    ).fetchall()
    assert ("console_api_key_issued", "user") in actions and ("api_key_revoked", "control_plane") in actions


def test_keys_of_others_are_out_of_reach(people: Stack, admin: Person) -> None:
    foreign = people.control.one(
        "SELECT k.id::text FROM queen_proxy.api_keys k JOIN queen_proxy.clusters c ON c.id = k.cluster_id"
        " WHERE c.slug = 'globex-prod'"
    )
    assert admin.request("DELETE", f"/api/console/keys/{foreign}", Content_Type="application/json").status == 404
    assert admin.request("DELETE", "/api/console/keys/nonsense", Content_Type="application/json").status == 400


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        {"name": "", "scopes": ["read"]},
        {"name": "x", "scopes": []},
        {"name": "x", "scopes": ["root"]},
        {"name": "x", "scopes": [1]},
        {"name": "x\x00", "scopes": ["read"]},
        {"name": "x" * 101, "scopes": ["read"]},
        {"name": "\ud800", "scopes": ["read"]},
        b"{",
        b"\xff",
    ],
)
def test_bad_keys_are_refused(admin: Person, body: object) -> None:
    response = admin.request("POST", "/api/console/keys", body)
    assert (response.status, response.json()["code"]) == (400, "invalid_request")


def test_changes_need_the_json_content_type(admin: Person) -> None:
    response = admin.request("POST", "/api/console/keys", b'{"name":"x","scopes":["read"]}', Content_Type="text/plain")
    assert response.status == 400


def test_api_keys_and_strangers_stay_out(people: Stack, admin: Person) -> None:
    key = Person(people.proxy).get("/api/console/overview", Authorization=f"Bearer {people.acme.key}")
    assert key.json()["error"] == "api keys cannot access the console (human session required)"
    assert Person(people.proxy).get("/api/console/overview").status == 401
    nowhere = admin.get("/api/console/overview", Host="nonesuch.local.test")
    assert (nowhere.status, nowhere.json()["code"]) == (401, "cluster_unknown")
    assert admin.get("/api/console/nonesuch").json()["code"] == "route_blocked"


def test_overview_and_usage(people: Stack, admin: Person) -> None:
    overview = admin.get("/api/console/overview").json()
    assert overview["slug"] == "acme-prod" and overview["role"] == "admin" and overview["status"] == "active"
    assert overview["plan"] == {"code": "free", "monthly_msgs_quota": None}
    assert overview["push_block"] is None
    assert overview["storage"] == {"max_retained_bytes": 1 << 30, "over_quota": False}
    assert len(overview["limits"]) == 11 and overview["limits"]["max_req_per_sec"] == 5
    people.control.sql.execute(
        "INSERT INTO queen_proxy.usage_minutes (cluster_id, minute, op_class, msgs, reqs, bytes_in)"
        " VALUES (%s, date_trunc('minute', now()) - interval '3 minutes', 'push', 7, 1, 99) ON CONFLICT DO NOTHING",
        (people.acme.cluster_id,),
    )
    usage = admin.get("/api/console/usage?hours=1").json()
    assert set(usage[0]) == {"minute", "op", "reqs", "msgs", "bytes_in", "bytes_out"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:00Z", usage[0]["minute"])
    for hours in ("0", "-1", "x", "999999999999", ""):
        assert admin.get(f"/api/console/usage?hours={hours}").status == 200
    for hours in (1, 6, 24, 168, 5):
        assert admin.get(f"/console/c/acme-prod/usage?hours={hours}").status == 200


def test_members_come_and_go_but_the_last_admin_stays(people: Stack, admin: Person) -> None:
    def change(method: str, **body: str) -> tuple[int, str]:
        response = admin.request(method, "/api/console/members", body)
        return response.status, response.json().get("error", "")

    people.control.sql.execute(
        "SELECT queen_proxy.create_user(%s, 'second@acme.example', NULL, 'local')", (people.acme.tenant_id,)
    )
    assert change("POST", email=EMAIL, role="viewer") == (400, "cannot demote the last admin of this cluster")
    assert change("DELETE", email=EMAIL) == (400, "cannot remove the last admin of this cluster")
    assert change("POST", email="nobody@acme.example", role="viewer") == change(
        "POST", email="ops@globex.example", role="viewer"
    )
    assert change("POST", email="nobody@acme.example", role="viewer")[0] == 404
    assert change("POST", email="second@acme.example", role="king")[0] == 400
    assert change("POST", email="\ud800@acme.example", role="viewer")[0] == 400
    granted = admin.request("POST", "/api/console/members", {"email": " Second@acme.example", "role": "admin"})
    assert granted.json() == {"ok": True, "email": "second@acme.example", "role": "admin"}
    members = {member["email"]: member["role"] for member in admin.get("/api/console/members").json()}
    assert members[EMAIL] == members["second@acme.example"] == "admin"
    assert change("POST", email="second@acme.example", role="consumer") == (200, "")
    assert change("DELETE", email="second@acme.example") == (200, "")
    assert change("DELETE", email="second@acme.example")[0] == 404


def test_an_invited_person_sets_a_password_once(people: Stack, admin: Person) -> None:
    path = "/console/c/acme-prod/members"
    invite = {"token": admin.token(), "email": "new@acme.example", "role": "producer"}
    older = _link(admin.post(path, invite).body)
    link = _link(admin.post(path, invite).body)
    assert older != link and link.encode() not in admin.get(path).body
    stored = people.control.one("SELECT token_hash FROM queen_proxy.invitations ORDER BY created_at DESC LIMIT 1")
    assert stored not in link and re.fullmatch("[0-9a-f]{64}", stored)
    invited = Person(people.proxy)
    assert invited.get(older).status == 404, "a new link takes the place of an older one"
    assert "new@acme.example" in invited.get(link).body.decode()
    for first, second in (("short", "short"), ("long enough 1", "long enough 2")):
        assert invited.post(link, {"password": first, "again": second}).status == 400
    done = invited.post(link, {"password": "correct horse", "again": "correct horse"})
    assert (done.status, done.headers["Location"]) == (303, "/console")
    assert invited.get("/auth/me").json()["clusters"][0]["role"] == "producer"
    late = Person(people.proxy)
    assert late.post(link, {"password": "correct horse 2", "again": "correct horse 2"}).status == 404
    assert late.sign_in("new@acme.example", "correct horse").status == 303


def test_an_invitation_ends_after_a_day(people: Stack, admin: Person) -> None:
    invite = {"token": admin.token(), "email": "slow@acme.example", "role": "viewer"}
    link = _link(admin.post("/console/c/acme-prod/members", invite).body)
    people.control.sql.execute("UPDATE queen_proxy.invitations SET expires_at = expires_at - interval '24 hours'")
    response = Person(people.proxy).post(link, {"password": "correct horse", "again": "correct horse"})
    assert response.status == 404


@pytest.mark.parametrize("email", ["ops@globex.example", "nonsense", "", "a b@c", "x\x00@y"])
def test_who_can_not_be_invited(admin: Person, email: str) -> None:
    invite = {"token": admin.token(), "email": email, "role": "viewer"}
    assert admin.post("/console/c/acme-prod/members", invite).status == 400


def test_a_changed_password_is_the_only_one(people: Stack) -> None:
    people.control.bootstrap("initech")
    person = Person(people.proxy)
    person.sign_in("ops@initech.example")
    form = {"token": person.token(), "old": "wrong", "password": "a longer password", "again": "a longer password"}
    assert person.post("/console/account", form).status == 400
    assert person.post("/console/account", form | {"old": "initial-password"}).status == 200
    assert Person(people.proxy).sign_in("ops@initech.example").status == 401
    assert Person(people.proxy).sign_in("ops@initech.example", "a longer password").status == 303


def test_queues_are_browsed_through_the_proxy(people: Stack, admin: Person) -> None:
    names = ["orders", "a/b c%?", '<script>alert("x")</script>']
    for name in names:
        assert people.push(name, {"n": 1}).status == 201
    page = admin.get("/console/c/acme-prod/queues").body.decode()
    assert "orders" in page and "<script>alert" not in page
    links = re.findall(r'href="(/console/c/acme-prod/queue\?name=[^"]+)"', page)
    assert len(links) >= len(names)
    for link in links:
        assert admin.get(link).status == 200, link
    assert admin.get("/console/c/acme-prod/queues?search=a/b").body.count(b"queue?name=") == 1
    assert admin.get("/console/c/acme-prod/queue?name=nonesuch").status == 404


def test_a_suspended_cluster_is_closed_here_too(people: Stack, admin: Person) -> None:
    people.control.sql.execute("SELECT queen_proxy.set_cluster_status(%s, 'suspended')", (people.acme.cluster_id,))
    try:
        wait_until(lambda: admin.get("/api/console/overview").status == 403, 5, "suspended")
        assert admin.get("/api/console/overview").json()["code"] == "cluster_suspended"
        assert admin.get("/console/c/acme-prod").status == 403
    finally:
        people.control.sql.execute("SELECT queen_proxy.set_cluster_status(%s, 'active')", (people.acme.cluster_id,))
    wait_until(lambda: admin.get("/api/console/overview").status == 200, 5, "active again")


def _link(page: bytes) -> str:
    match = re.search(r"/auth/invite/[\w-]{43}", page.decode())
    assert match, page
    return match[0]
