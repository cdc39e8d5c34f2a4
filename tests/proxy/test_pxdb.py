"""The proxy's database goes away: tenants don't notice, and nothing that was counted is lost."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from queen.db.embedded import EmbeddedServer
from tests.broker import HOST, Broker, wait_until
from tests.conftest import Database
from tests.proxy.conftest import Stack
from tests.proxy.stage import BROKER, ControlPlane, Proxy


@pytest.fixture
def apart(
    embedded: EmbeddedServer, messages: Database, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Stack, EmbeddedServer]]:
    """A stack whose control plane is on a server of its own."""
    directory = tmp_path_factory.mktemp("apart")
    with psycopg.connect(embedded.dsn(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE queen_proxy")
    environment = {f"PXDB_{name.removeprefix('PG_')}": text for name, text in embedded.environment().items()}
    environment["PXDB_DB"] = "queen_proxy"
    broker = Broker(directory / "queen-a", messages.environment(), "queen-a")
    proxy = Proxy(directory / "proxy", environment, "proxy")
    control = None
    try:
        broker.start(BROKER)
        proxy.start({"QUEEN_PROXY_METER_FLUSH_MS": "500", "PXDB_TIMEOUT_MS": "1000"})
        control = ControlPlane(embedded.dsn("queen_proxy"))
        control.add_cell(f"http://{HOST}:{broker.port}")
        yield Stack([broker], proxy, control, control.bootstrap("acme", "dedicated-s")), embedded
    finally:
        if control:
            control.close()
        proxy.kill()
        broker.kill()


def test_cached_clusters_go_on_and_usage_is_kept(apart: tuple[Stack, EmbeddedServer]) -> None:
    stack, server = apart
    # Once this is in force, nothing that was announced before is still to come and clear the memory.
    stack.control.one("SELECT queen_proxy.set_limit_override(%s, '{\"max_batch_items\": 5}')", stack.acme.cluster_id)
    pushed = 1 + 10

    def in_force() -> bool:
        nonlocal pushed
        status = stack.push("away", *range(6)).status
        pushed += 6 * (status == 201)
        return status == 413

    wait_until(in_force, 20, "the override is in force")
    assert stack.push("away", 1).status == 201
    stack.control.close()
    server.stop("immediate")
    for number in range(10):
        assert stack.push("away", number).status == 201
    assert stack.proxy.request("GET", "/healthz").status == 200
    unknown = stack.request("GET", "/api/v1/pop/queue/away", Authorization="Bearer qk_live_unknown")
    assert (unknown.status, unknown.json()["error"]) == (401, "unknown or revoked api key")
    stack.proxy.stop()
    server.start()
    stack.proxy.restart()
    control = ControlPlane(server.dsn("queen_proxy"))

    def counted() -> bool:
        total = "SELECT coalesce(sum(msgs), 0) FROM queen_proxy.usage_minutes WHERE op_class = 'push'"
        return bool(control.one(total) == pushed)

    try:
        wait_until(counted, 60, "what was pushed meanwhile is counted")
        assert stack.push("away", "back").status == 201
        listening = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'queen-proxy-listen'"
        wait_until(lambda: control.one(listening) == 1, 30, "the listener is back")
    finally:
        control.close()
