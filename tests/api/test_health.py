"""Readiness and liveness."""

from __future__ import annotations

import json
import threading

from queen import __version__
from queen.db.embedded import EmbeddedServer
from tests.api.conftest import Api
from tests.broker import Broker, wait_until
from tests.conftest import Brokers


def test_health_says_that_the_database_answers(api: Api) -> None:
    response = api.request("GET", "/health")
    assert response.status == 200
    assert response.headers["Content-Type"] == "application/json"
    assert response.json() == {
        "status": "healthy",
        "database": "connected",
        "engine": "segments-python",
        "version": __version__,
    }


def test_status_names_the_engine(api: Api) -> None:
    assert api.get("/status") == {"status": "ok", "engine": "segments-python"}


def test_head_answers_without_a_body(api: Api) -> None:
    for path in ("/health", "/status"):
        response = api.request("HEAD", path)
        assert (response.status, response.body) == (200, b"")


def test_only_reading_is_allowed(api: Api) -> None:
    for path in ("/health", "/status"):
        response = api.request("POST", path, {})
        assert (response.status, response.body) == (405, b"")
        assert "GET" in response.headers["Allow"]


def test_a_trailing_slash_is_another_path(api: Api) -> None:
    assert api.request("GET", "/health/").status == 404


def test_without_database_a_broker_is_alive_but_not_ready(brokers: Brokers, embedded: EmbeddedServer) -> None:
    broker = brokers(postgres=embedded.environment())
    embedded.stop("immediate")

    response = broker.request("GET", "/health")
    assert response.status == 503
    assert response.json() == {
        "status": "unhealthy",
        "database": "disconnected",
        "engine": "segments-python",
        "version": __version__,
    }
    assert broker.request("GET", "/status").status == 200

    embedded.start()
    wait_until(lambda: broker.request("GET", "/health").status == 200, 30, "the broker is ready again")


def test_a_broker_that_is_stopping_is_not_ready(broker: Broker) -> None:
    with broker.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: queen\r\n")  # a request under way at the signal
        broker.request("GET", "/status")  # it was accepted before this
        stopping = threading.Thread(target=broker.stop, daemon=True)
        stopping.start()
        wait_until(lambda: "draining in-flight requests" in broker.log(), what="the broker is stopping")
        connection.sendall(b"\r\n")
        answer = b""
        while part := connection.recv(4096):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert json.loads(body)["status"] == "stopping"
    stopping.join(40)
