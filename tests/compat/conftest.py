"""Every test here runs with each version of the official client, against one broker and against two.

The tests say what a client must see; the scenarios they play, in `scenarios/`, are code as users of the
client write it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from pytest_postgresql.executors import NoopExecutor
from pytest_postgresql.janitor import DatabaseJanitor

from tests.broker import Broker
from tests.compat.environments import InstallationError, python_of
from tests.compat.player import Player
from tests.conftest import Database

VERSIONS = ("1.0.0", "1.3.0")
DEPLOYMENTS = (1, 2)  # brokers on one database

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Deployment:
    """Brokers on one database."""

    brokers: list[Broker]

    @property
    def urls(self) -> list[str]:
        """What a client is given to reach all of them."""
        return [broker.url for broker in self.brokers]


@dataclass
class Play:
    """Plays scenarios of one version of the client against one deployment, for one test."""

    player: Player
    urls: list[str]
    test: str

    @property
    def version(self) -> str:
        """The version of the client."""
        return self.player.version

    def __call__(self, scenario: str, *, seconds: float = 30.0, **arguments: Any) -> Any:
        """Run a scenario, `module.function`, with its arguments, and return its result."""
        return self.together(scenario, [arguments], seconds)[0]

    def together(self, scenario: str, variants: list[dict[str, Any]], seconds: float = 30.0) -> list[Any]:
        """Run a scenario with several sets of arguments at the same time; most wait more than they work."""
        orders = [
            {
                "scenario": scenario,
                "urls": self.urls,
                "name": f"{self.test}-{next(_numbers)}",
                "arguments": arguments,
            }
            for arguments in variants
        ]
        return self.player.play(orders, seconds)


@pytest.fixture(scope="session", params=DEPLOYMENTS, ids=lambda count: f"brokers-{count}")
def deployment(
    request: pytest.FixtureRequest, schema_template: NoopExecutor, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """One broker, or two, that all tests share: each keeps to queues and groups of its own."""
    name = f"queen_test_{os.getpid()}_compat_{request.param}"
    janitor = DatabaseJanitor(
        host=schema_template.host,
        port=schema_template.port,
        user=schema_template.user,
        password=schema_template.password,
        dbname=name,
        template_dbname=schema_template.template_dbname,
    )
    with janitor:
        postgres = Database(schema_template, name).environment()
        directory = tmp_path_factory.mktemp("compat")
        names = [f"broker-{number + 1}" for number in range(request.param)]
        brokers = [Broker(directory / name, postgres, name) for name in names]
        try:
            for broker in brokers:
                broker.start(wait=False)
            for broker in brokers:
                broker.wait_healthy()
            yield Deployment(brokers)
        finally:
            for broker in brokers:
                broker.kill()


@pytest.fixture(scope="session", params=VERSIONS, ids=lambda version: f"client-{version}")
def player(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Player]:
    """The client of one version."""
    try:
        python = python_of(request.param)
    except InstallationError as error:
        pytest.fail(str(error), pytrace=False)
    player = Player(request.param, python, tmp_path_factory.mktemp("client") / "log")
    yield player
    player.stop()


@pytest.fixture
def play(request: pytest.FixtureRequest, player: Player, deployment: Deployment) -> Play:
    """Plays scenarios against the deployment, each with a queue name of its own."""
    return Play(player, deployment.urls, request.node.originalname)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add what brokers and client wrote to the report of a test that failed."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    fixtures = getattr(item, "funcargs", {})
    if report.when != "call" or not report.failed:
        return
    if deployment := fixtures.get("deployment"):
        for broker in deployment.brokers:
            report.sections.append((f"log of {broker.name}", _tail(broker.log())))
    if player := fixtures.get("player"):
        report.sections.append((f"log of client {player.version}", _tail(player.log())))


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-100:])
