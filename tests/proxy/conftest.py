"""The reference stack for tests: two brokers behind a proxy, one database each for messages and control plane."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pytest_postgresql.executors import NoopExecutor
from pytest_postgresql.janitor import DatabaseJanitor

from tests.broker import HOST, Broker, Response
from tests.conftest import Database, ServerAddress
from tests.proxy.stage import BROKER, ControlPlane, Proxy, Tenant

_numbers = itertools.count(1)


@dataclass
class Stack:
    """A cell with its proxy, and one tenant of it, acme."""

    brokers: list[Broker]
    proxy: Proxy
    control: ControlPlane
    acme: Tenant

    def request(
        self, method: str, target: str, body: Any = None, tenant: Tenant | None = None, **headers: str
    ) -> Response:
        """One request through the proxy, as acme unless told otherwise. Keywords are headers; "" leaves one out."""
        given = {name.replace("_", "-"): text for name, text in headers.items()}
        fields = {**(tenant or self.acme).headers, **given}
        return self.proxy.request(method, target, body, {name: text for name, text in fields.items() if text})

    def push(self, queue: str, *payloads: Any, tenant: Tenant | None = None, **fields: Any) -> Response:
        items = [{"queue": queue, "payload": payload, **fields} for payload in payloads]
        return self.request("POST", "/api/v1/push", {"items": items}, tenant)

    def pop(self, queue: str, query: str = "batch=100", tenant: Tenant | None = None) -> Response:
        return self.request("GET", f"/api/v1/pop/queue/{queue}?{query}", None, tenant)


def pxdb_environment(server: ServerAddress | NoopExecutor, name: str) -> dict[str, str]:
    return {
        "PXDB_HOST": str(server.host),
        "PXDB_PORT": str(server.port),
        "PXDB_USER": server.user,
        "PXDB_PASSWORD": server.password or "",
        "PXDB_DB": name,
    }


@pytest.fixture(scope="module")
def pxdb(postgres_server: ServerAddress) -> Iterator[tuple[dict[str, str], str]]:
    """An empty database for a control plane: the variables that name it, and its conninfo."""
    name = f"queen_proxy_test_{os.getpid()}_{next(_numbers)}"
    admin = psycopg.conninfo.make_conninfo(
        host=postgres_server.host,
        port=postgres_server.port,
        user=postgres_server.user,
        password=postgres_server.password,
        dbname="postgres",
    )
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    try:
        yield pxdb_environment(postgres_server, name), psycopg.conninfo.make_conninfo(admin, dbname=name)
    finally:
        with psycopg.connect(admin, autocommit=True) as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)".encode())


@pytest.fixture(scope="module")
def messages(schema_template: NoopExecutor) -> Iterator[Database]:
    """A database for a cell's brokers."""
    name = f"queen_cell_test_{os.getpid()}_{next(_numbers)}"
    with DatabaseJanitor(
        host=schema_template.host,
        port=schema_template.port,
        user=schema_template.user,
        password=schema_template.password,
        dbname=name,
        template_dbname=schema_template.template_dbname,
    ):
        yield Database(schema_template, name)


@pytest.fixture(scope="module")
def stack(
    pxdb: tuple[dict[str, str], str], messages: Database, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """Two brokers, the proxy in shadow mode, and the tenant acme on the plan free."""
    directory: Path = tmp_path_factory.mktemp("stack")
    environment, conninfo = pxdb
    brokers = [Broker(directory / name, messages.environment(), name) for name in ("queen-a", "queen-b")]
    proxy = Proxy(directory / "proxy", environment, "proxy")
    control = None
    try:
        for broker in brokers:
            broker.start(BROKER)
        proxy.start({"QUEEN_PROXY_RECONCILE_MS": "500", "QUEEN_PROXY_METER_FLUSH_MS": "500"})
        control = ControlPlane(conninfo)
        control.add_cell(f"http://{HOST}:{brokers[0].port},{HOST}:{brokers[1].port}")
        yield Stack(brokers, proxy, control, control.bootstrap("acme"))
    finally:
        if control:
            control.close()
        for process in (proxy, *brokers):
            process.kill()
