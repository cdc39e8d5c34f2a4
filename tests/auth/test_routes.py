"""Every route under every kind of token, and what is recorded of who pushed."""

from __future__ import annotations

import time

import pytest

from queen.auth.levels import DEMANDS, PASSES, UNCLASSIFIED, Level, demand_of_nothing, demand_of_route
from tests.auth.routes import Route, every_route
from tests.auth.tokens import SECRET, confused, pem, raw_claims, rsa_key, token, unsigned
from tests.broker import Broker, wait_until
from tests.conftest import Brokers

ROLES = ("admin", "read-write", "read-only", "write-only")
KEY, OTHER = rsa_key(), rsa_key()
TENANT, STRANGER = "11111111-2222-4333-8444-555555555555", "99999999-2222-4333-8444-555555555555"
SETTINGS = {
    "JWT_ENABLED": "true",
    "JWT_ALGORITHM": "auto",
    "JWT_SECRET": SECRET,
    "JWT_PUBLIC_KEY": pem(KEY).decode(),
    "JWT_AUDIENCE": "queen",
    "JWT_TENANT_CLAIM": "tenant",
    "QUEEN_TENANCY_HEADER": "1",
    "QUEEN_KV_TRUSTED_PROXY": "1",
}


def bearer(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


def signed(**claims: object) -> dict[str, str]:
    return bearer(token(aud="queen", **claims))


def test_every_route_is_classified() -> None:
    unknown = [route for route in every_route() if demand_of_route(route.method, route.rule) is UNCLASSIFIED]
    assert unknown == [], "add them to the table of queen/auth/levels.py; until then they need an admin"


def test_what_nobody_classified_needs_an_admin_and_what_is_not_there_read_write() -> None:
    assert demand_of_route("GET", "/api/v1/brand-new/<thing>").level is Level.ADMIN
    assert demand_of_route("PATCH", "/health").level is Level.ADMIN
    assert demand_of_route("HEAD", "/health").level is Level.PUBLIC
    assert demand_of_nothing("/api/v1/nothing").level is Level.READ_WRITE
    assert {demand_of_nothing(path).level for path in ("/", "/assets/a.js", "/favicon.ico")} == {Level.PUBLIC}


def level_by_path(method: str, path: str) -> Level:
    """The published classification by path, first match wins: what the table must agree with."""
    if path in ("/health", "/metrics", "/metrics/prometheus", "/") or path.startswith(("/assets/", "/favicon")):
        return Level.PUBLIC
    if path in ("/auth/me", "/auth/login", "/auth/logout"):
        return Level.PUBLIC
    if path.startswith(("/api/v1/system/", "/internal/")) or path == "/api/v1/stats/refresh":
        return Level.ADMIN
    if method == "DELETE" and path.startswith(("/api/v1/consumer-groups/", "/api/v1/resources/queues/")):
        return Level.ADMIN
    if (method, path) == ("DELETE", "/api/v1/dlq"):
        return Level.ADMIN
    below = ("status", "analytics", "resources/", "messages", "consumer-groups", "dlq", "traces", "kv", "timers")
    reads = tuple(f"/api/v1/{word}" for word in (*below, "ephemeral/queues"))
    if method == "GET" and (path == "/status" or path.startswith(reads)):
        return Level.READ_ONLY
    if path.startswith("/streams/"):
        return Level.READ_ONLY if path == "/streams/v1/state/get" else Level.READ_WRITE
    if (method, path) in [("POST", f"/api/v1/{word}") for word in ("push", "timers", "ephemeral/push")]:
        return Level.WRITE_ONLY
    return Level.READ_WRITE


def test_the_table_agrees_with_the_published_rules() -> None:
    assert {key: demand.level for key, demand in DEMANDS.items()} == {key: level_by_path(*key) for key in DEMANDS}


def test_every_route_under_every_token(brokers: Brokers) -> None:
    broker = brokers(SETTINGS)
    refused = {
        "Authentication required": [{}],
        "Token has expired": [signed(role="admin", exp=int(time.time()) - 100)],
        "Invalid token signature": [
            bearer(token("the wrong secret " * 4, aud="queen", role="admin")),
            bearer(token(OTHER, "RS256", aud="queen", role="admin")),
            bearer(confused(pem(KEY), aud="queen", role="admin")),
        ],
        "Invalid token audience": [bearer(token(aud="another", role="admin")), bearer(token(role="admin"))],
        "Unsupported token algorithm": [bearer(unsigned({"alg": "none"}, aud="queen", role="admin"))],
        "Bad token header": [bearer(""), bearer("x"), {"Authorization": ""}],
        "Invalid token claims": [bearer(raw_claims(b'{"aud":"queen","role":"admin","exp":"never"}'))],
    }
    for route in every_route():
        demand = demand_of_route(route.method, route.rule)
        for message, kinds in refused.items():
            for headers in kinds:
                response = broker.request(route.method, route.path(), b"not even JSON", headers)
                if demand.level is Level.PUBLIC:
                    assert response.status not in (401, 403), (route, message)
                else:
                    assert (response.status, response.json()) == (401, {"error": message}), (route, message)
        for role in ROLES:
            headers = signed(role=role, tenant=TENANT) | {"x-queen-tenant": TENANT}
            response = send(broker, route, headers)
            allowed = demand.level is Level.PUBLIC or (demand.level in PASSES[role] and demand.scoped)
            check(route, role, response.status, allowed)
            for other in ({"x-queen-tenant": STRANGER}, {}):
                response = send(broker, route, signed(role=role, tenant=TENANT) | other)
                check(route, f"{role} of another tenant", response.status, demand.level is Level.PUBLIC)
            # A token that is for no tenant in particular is the operator's, and has to be an admin's.
            response = send(broker, route, signed(role=role))
            check(route, f"{role} of all tenants", response.status, demand.level is Level.PUBLIC or role == "admin")


def send(broker: Broker, route: Route, headers: dict[str, str]):  # type: ignore[no-untyped-def]
    # Maintenance stays off and nothing waits: the body is refused after the caller was let in.
    return broker.request(route.method, route.path() + "?wait=false", b"not even JSON", headers)


def check(route: Route, who: str, status: int, allowed: bool) -> None:
    assert (status != 403) == allowed, (route, who, status)
    assert status != 401 and (status < 500 or not allowed), (route, who, status)


def test_odd_spellings_of_a_path_open_nothing(brokers: Brokers) -> None:
    broker = brokers(SETTINGS)
    for path in (
        "/health/../api/v1/dlq", "//health", "/health/", "/%68ealth", "/api/v1//dlq", "/api/v1/dlq/", "/api/v1/%64lq",
        "/assets%2F../api/v1/dlq", "/API/v1/dlq", "/api/v1/dlq;/health", "/x?/health", "/health%3F",
    ):  # fmt: skip
        for method in ("GET", "HEAD", "OPTIONS", "POST"):
            status = broker.request(method, path).status
            assert status == 401, (method, path, status)
    assert broker.request("GET", "/assets/../api/v1/dlq").status == 404  # no route, and no file either
    assert broker.request("HEAD", "/api/v1/dlq").status == 401
    assert broker.request("GET", "http://x/api/v1/dlq").status == 401
    reader = signed(role="read-only", tenant=TENANT) | {"x-queen-tenant": TENANT}
    assert broker.request("HEAD", "/api/v1/dlq", headers=reader).status == 200
    assert broker.request("GET", "/api/v1/pop/queue/%ff").status == 401


def test_odd_headers_never_pass_and_never_break(brokers: Brokers) -> None:
    broker = brokers(SETTINGS)
    good = token(aud="queen", role="admin", sub="operator")
    for value in (
        "\xe9", "Bearer", "Bearer ", "Bearer  ", "Basic dTpw", f"Basic {good}", f"Bearer Bearer {good}", good[:-2],
        f"{good},{good}", f"Bearer {good} x", "." * 3000, "e30.e30.", "..", "Bearer " + "A" * 7000, f"{good}\xa0",
    ):  # fmt: skip
        response = broker.request("GET", "/api/v1/dlq", headers={"Authorization": value})
        assert response.status == 401, (value[:60], response)
        assert good not in response.body.decode() and SECRET not in response.body.decode()
    for value in (good, f"bearer {good}", f"BEARER  {good}"):
        assert broker.request("GET", "/api/v1/dlq", headers={"Authorization": value}).status == 200
    assert good not in broker.log() and SECRET not in broker.log()


def test_an_unauthenticated_body_is_not_read_and_the_connection_serves_on_without_one(brokers: Brokers) -> None:
    broker = brokers(SETTINGS)
    with broker.connect() as connection:
        connection.sendall(b"POST /api/v1/push HTTP/1.1\r\nHost: x\r\nContent-Length: 50000000\r\n\r\n")
        answer = b""
        while part := connection.recv(65536):  # it ends, though the body never came
            answer += part
        assert answer.startswith(b"HTTP/1.1 401 ") and answer.endswith(b'{"error":"Authentication required"}')
    with broker.connect() as connection:
        for _ in range(2):
            connection.sendall(b"GET /api/v1/dlq HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")


def test_the_producer_is_who_the_token_says(brokers: Brokers) -> None:
    broker = brokers({"JWT_ENABLED": "1", "JWT_SECRET": SECRET})
    who = {name: bearer(token(role="read-write", **({"sub": name} if name else {}))) for name in ("ann", "böb", "")}
    forged = {"producerSub": "root"}
    for name, headers in who.items():
        item = {"queue": "q", "transactionId": f"p-{name}", "payload": name, **forged}
        assert broker.request("POST", "/api/v1/push", {"items": [item], **forged}, headers).status == 201
        push = {"type": "push", "items": [{**item, "transactionId": f"t-{name}"}], **forged}
        answer = broker.request("POST", "/api/v1/transaction", {"operations": [push], **forged}, headers)
        assert answer.json()["success"]
    target = "/api/v1/pop/queue/q?batch=10&consumerGroup=g&subscriptionMode=all"
    messages = broker.request("GET", target, headers=who["ann"]).json()["messages"]
    assert {m["transactionId"]: m["producerSub"] for m in messages} == {
        f"{kind}-{name}": name or None for kind in "pt" for name in who
    }


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"JWT_ENABLED": "ture"}, 'JWT_ENABLED="ture" is not a boolean (expected '),
        ({"JWT_ENABLED": "1"}, "invalid JWT auth configuration: JWT_ENABLED=true with JWT_ALGORITHM=HS256 but no key"),
        (
            {"JWT_ENABLED": "1", "JWT_ALGORITHM": "none", "JWT_SECRET": "x"},
            "invalid JWT auth configuration: JWT_ALGORITHM=none is not supported (use HS256, ",
        ),
        ({"QUEEN_TENANCY_HEADER": "1"}, "QUEEN_TENANCY_HEADER=1 without QUEEN_KV_TRUSTED_PROXY=1: "),
    ],
)
def test_a_broker_that_would_be_open_refuses_to_start(
    brokers: Brokers, variables: dict[str, str], message: str
) -> None:
    broker = brokers(variables, wait=False)
    assert broker.wait_exit() != 0
    assert f"FATAL: {message}" in broker.log()


def test_the_log_says_what_protects_the_broker(brokers: Brokers) -> None:
    log = brokers(SETTINGS).log()
    assert "boot: JWT auth ENABLED algorithm=auto" in log
    assert "boot: QUEEN_TENANCY_HEADER on — native tenant scoping ENABLED header=x-queen-tenant" in log
    assert SECRET not in log and "BEGIN PUBLIC KEY" not in log
    bare = brokers()
    wait_until(lambda: "JWT auth disabled — API and dashboard are open (standalone)" in bare.log())
