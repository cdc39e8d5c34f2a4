"""The official client under load through the proxy, while one broker after the other is killed under it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from tests.broker import HOST, Broker, wait_until
from tests.compat.environments import python_of
from tests.conftest import Database
from tests.proxy.conftest import Stack
from tests.proxy.stage import BROKER, ControlPlane, Proxy

MESSAGES = 400

# Pushes every number once, and goes on until it has been taken; tells how far it is, one line each.
PRODUCER = """
import asyncio, sys
from queen import Queen

async def main():
    async with Queen(url=sys.argv[1], bearer_token=sys.argv[2]) as client:
        for number in range(int(sys.argv[3])):
            item = {"transactionId": f"t{number}", "data": {"number": number}}
            while True:
                try:
                    await client.queue("load").partition(f"p{number % 4}").push(item)
                    break
                except Exception as error:
                    print("again", number, repr(error), file=sys.stderr)
                    await asyncio.sleep(0.1)
            print("pushed", number, flush=True)

asyncio.run(main())
"""


@pytest.fixture
def shared(
    pxdb: tuple[dict[str, str], str], messages: Database, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """A stack whose proxy takes its own address as a shared host, as the client sends no other name."""
    directory = tmp_path_factory.mktemp("shared")
    environment, conninfo = pxdb
    brokers = [Broker(directory / name, messages.environment(), name) for name in ("queen-a", "queen-b")]
    proxy = Proxy(directory / "proxy", environment, "proxy")
    control = None
    try:
        for broker in brokers:
            broker.start(BROKER)
        proxy.start({"QUEEN_PROXY_SHARED_HOSTS": HOST})
        control = ControlPlane(conninfo)
        control.add_cell(f"http://{HOST}:{brokers[0].port},{HOST}:{brokers[1].port}")
        yield Stack(brokers, proxy, control, control.bootstrap("acme", "dedicated-s"))
    finally:
        if control:
            control.close()
        for process in (proxy, *brokers):
            process.kill()


def test_nothing_is_lost_or_doubled_when_brokers_die(shared: Stack) -> None:
    stack = shared
    health = stack.proxy.request("GET", "/healthz").json()
    assert health["shared_hosts"] == 1
    producer = subprocess.Popen(
        [python_of("1.3.0"), "-I", "-c", PRODUCER, stack.proxy.url, stack.acme.key, str(MESSAGES)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert producer.stdout
        for line in producer.stdout:
            word, _, number = line.partition(" ")
            if word == "pushed" and int(number) in (MESSAGES // 4, MESSAGES // 2):
                broker = stack.brokers[int(number) == MESSAGES // 2]
                broker.kill()
                assert stack.proxy.request("GET", "/healthz").status == 200
                broker.restart()
        assert producer.wait(60) == 0
    finally:
        producer.kill()
    seen: list[int] = []

    def all_there() -> bool:
        response = stack.pop("load", "batch=200&partitions=4&autoAck=true")
        if response.status == 200:
            seen.extend(message["data"]["number"] for message in json.loads(response.body)["messages"])
        return response.status == 204 and len(seen) >= MESSAGES

    wait_until(all_there, 60, "every message is delivered")
    assert sorted(seen) == list(range(MESSAGES))
