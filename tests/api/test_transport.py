"""HTTP itself: paths, methods, bodies, connections and the graceful stop, on raw sockets."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from tests.api.conftest import Api, segment
from tests.broker import Broker, wait_until
from tests.conftest import Brokers, Database

NOT_FOUND = b'{"error":"Not Found","code":"no_such_route"}'
TOO_LARGE = b'{"error":"request body too large"}'
CAP = 1000
DEFAULT_CAP = 67_108_864
WAITING = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"

ROUTES = {
    "/api/v1/push": "POST",
    "/api/v1/pop": "GET",
    "/api/v1/pop/queue/q": "GET",
    "/api/v1/pop/queue/q/partition/p": "GET",
    "/api/v1/ack": "POST",
    "/api/v1/ack/batch": "POST",
    "/api/v1/lease/l/extend": "POST",
    "/api/v1/transaction": "POST",
}


class Raw(NamedTuple):
    """A response as it came: its header lines in lower case, and its body."""

    status: int
    headers: dict[str, str]
    body: bytes


class Wire:
    """One connection that says exactly what a test says and reads one response after the other."""

    def __init__(self, broker: Broker) -> None:
        self.socket = broker.connect(20)
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.socket.close()

    def send(self, head: str, body: bytes = b"") -> Wire:
        """Send a request line and header lines, separated by line breaks, and a body; Host is added."""
        lines = head.strip().split("\n")
        lines.insert(1, "Host: broker")
        self.socket.sendall("\r\n".join(line.strip() for line in lines).encode() + b"\r\n\r\n" + body)
        return self

    def post(self, path: str, body: bytes) -> Wire:
        """Send a POST with a Content-Length."""
        return self.send(f"POST {path} HTTP/1.1\nContent-Length: {len(body)}", body)

    def receive(self, has_body: bool = True) -> Raw:
        """Read one response."""
        version, status, *_ = self._file.readline().split()
        assert version == b"HTTP/1.1"
        headers = {}
        while (line := self._file.readline().decode().strip()) != "":
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        length = int(headers.get("content-length", 0)) if has_body else 0
        return Raw(int(status), headers, self._file.read(length))

    def ended(self) -> bool:
        """Whether nothing more comes: the other side closed or reset the connection."""
        try:
            return self._file.read(1) == b""
        except ConnectionResetError:
            return True


@pytest.fixture
def wire(api: Api) -> Iterator[Wire]:
    with Wire(api.broker) as connection:
        yield connection


@pytest.fixture(scope="module")
def capped(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A second broker, which takes bodies of at most CAP bytes."""
    broker = Broker(tmp_path_factory.mktemp("capped"), api.database.environment(), "capped")
    try:
        yield broker.start({"QUEEN_MAX_BODY_BYTES": str(CAP)})
    finally:
        broker.kill()


def chunks(body: bytes, size: int) -> bytes:
    """A body in the chunked coding."""
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def one_item(queue: str) -> bytes:
    return json.dumps({"items": [{"queue": queue, "payload": 1}]}).encode()


def padded(size: int) -> bytes:
    """A legal push of nothing, of exactly this size."""
    return b'{"items":[' + b" " * (size - 12) + b"]}"


# Paths and methods


@pytest.mark.parametrize(
    "method, path",
    [
        ("GET", "/api"),
        ("GET", "/api/"),
        ("GET", "/api/v1"),
        ("GET", "/api/v2/pop/queue/q"),
        ("GET", "/api/v1/Pop/queue/q"),
        ("POST", "/api/v1/push/"),
        ("GET", "/api/v1/pop/"),
        ("GET", "/api/v1/pop/queue"),
        ("GET", "/api/v1/pop/queue/"),
        ("GET", "/api/v1/pop/queue/q/"),
        ("GET", "/api/v1/pop/queue//partition/p"),
        ("GET", "/api/v1/pop/queue/q/partition/"),
        ("POST", "/api/v1/lease//extend"),
        ("POST", "/api/v1/lease/l"),
        ("POST", "//api/v1/push"),
        ("POST", "/api//v1/push"),
        ("POST", "/"),
        ("POST", "/anything"),
        ("DELETE", "/"),
        ("BREW", "/coffee"),
        # What helpers of the clients call, and no broker of this generation has.
        ("DELETE", "/api/v1/queues/q/clear"),
        ("GET", "/api/v1/resources/partitions"),
        ("POST", "/api/v1/messages/p/t/dlq"),
    ],
)
def test_a_path_that_is_no_route_is_not_found(api: Api, method: str, path: str) -> None:
    response = api.request(method, path)
    assert (response.status, response.body) == (404, NOT_FOUND)
    assert response.headers["Content-Type"] == "application/json"


@pytest.mark.parametrize("path", ROUTES)
def test_a_wrong_method_is_told_the_right_one(api: Api, path: str) -> None:
    for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
        if method != ROUTES[path]:
            response = api.request(method, path)
            assert (method, response.status, response.body) == (method, 405, b"")
            assert response.headers["Allow"] == ROUTES[path]


def test_a_head_leases_nothing(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "payload": 1}])
    for suffix in ("", "?autoAck=true", "/partition/Default"):
        assert api.request("HEAD", f"/api/v1/pop/queue/{name}{suffix}").status == 405
    assert len(api.broker.pop(name)) == 1


def test_a_head_elsewhere_is_a_get_without_its_body(api: Api, wire: Wire) -> None:
    length = str(len(api.request("GET", "/status").body))
    wire.send("HEAD /status HTTP/1.1").send("GET /status HTTP/1.1")
    response = wire.receive(has_body=False)
    assert (response.status, response.headers["content-length"]) == (200, length)
    assert wire.receive().status == 200


@pytest.mark.parametrize(
    "text", ["a/b", "/", "a b", "a+b", "100%", "%2F", "..", ".", "a?b#c", "ü", "\U0001f98a", "a\\b", '"', "&=;,:@"]
)
def test_a_segment_of_a_path_is_one_name_once_decoded(api: Api, name: str, text: str) -> None:
    queue, partition = f"{name}{text}", text
    api.broker.push([{"queue": queue, "partition": partition, "payload": 1}])
    path = f"/api/v1/pop/queue/{segment(queue)}/partition/{segment(partition)}"
    answer = api.get(path)
    assert (answer["queue"], answer["partition"]) == (queue, partition)


def test_a_plus_is_a_plus_in_a_path_and_a_space_in_a_query(api: Api, name: str) -> None:
    api.broker.push([{"queue": f"{name}+", "payload": 1}])
    answer = api.get(f"/api/v1/pop/queue/{name}+?consumerGroup=a+b&subscriptionMode=all")
    assert answer["queue"] == f"{name}+"
    assert answer["consumerGroup"] == "a b"


@pytest.mark.parametrize("text", ["%ff", "a%C3", "%ED%A0%80", "%C0%AF", "x%80y"])
@pytest.mark.parametrize(
    "method, pattern",
    [
        ("GET", "/api/v1/pop/queue/{}"),
        ("GET", "/api/v1/pop/queue/q/partition/{}"),
        ("POST", "/api/v1/lease/{}/extend"),
        ("GET", "/api/v1/pop/queue/q?consumerGroup={}"),
        ("GET", "/api/v1/pop?namespace={}"),
    ],
)
def test_what_is_not_utf8_once_decoded_is_refused(api: Api, method: str, pattern: str, text: str) -> None:
    response = api.request(method, pattern.format(text))
    assert response.status == 400
    assert list(response.json()) == ["error"]


def test_a_percent_sign_that_starts_no_escape_stands_for_itself(api: Api, name: str) -> None:
    api.broker.push([{"queue": f"{name}%zz%", "payload": 1}])
    assert api.get(f"/api/v1/pop/queue/{name}%zz%")["queue"] == f"{name}%zz%"


def test_a_target_may_name_the_host(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "payload": 1}])
    assert api.get(f"http://broker/api/v1/pop/queue/{name}?batch=1")["queue"] == name


def test_unknown_parameters_and_keys_are_ignored(api: Api, name: str) -> None:
    item = {"queue": name, "payload": 1, "priority": [{}], "data": 2}
    assert api.request("POST", "/api/v1/push?dry=1", {"items": [item], "more": None}).status == 201
    (message,) = api.get(f"/api/v1/pop/queue/{name}?limit=x&a&=&")["messages"]
    ack = {**message, "status": "completed", "retries": 1e400, "nested": {"a": []}}
    body = json.dumps(ack).replace("Infinity", "1e400").encode()
    assert api.post("/api/v1/ack", body)[0]["success"] is True


# Answers


def test_a_204_is_a_status_line_and_headers_alone(api: Api, wire: Wire, name: str) -> None:
    wire.send(f"GET /api/v1/pop/queue/{name} HTTP/1.1").send("GET /status HTTP/1.1")
    response = wire.receive()
    assert response.status == 204
    assert not {"content-length", "content-type", "transfer-encoding"} & set(response.headers)
    assert wire.receive().status == 200


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded", "nonsense"])
def test_the_content_type_of_a_body_does_not_matter(wire: Wire, name: str, content_type: str) -> None:
    header = f"\nContent-Type: {content_type}" if content_type else ""
    body = one_item(name)
    wire.send(f"POST /api/v1/push HTTP/1.1\nContent-Length: {len(body)}{header}", body)
    response = wire.receive()
    assert response.status == 201
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "method, path, body",
    [
        ("POST", "/api/v1/push", b"{"),
        ("POST", "/api/v1/ack", b"[]"),
        ("POST", "/api/v1/ack/batch", b'{"acknowledgments":null}'),
        ("POST", "/api/v1/transaction", b"nonsense"),
        ("GET", "/api/v1/pop/queue/q?batch=x", None),
        ("GET", '/api/v1/pop/queue/q?wait="\\%00', None),
        ("GET", "/api/v1/pop/queue/%ff", None),
    ],
)
def test_an_error_is_one_key_of_json(api: Api, method: str, path: str, body: bytes | None) -> None:
    response = api.request(method, path, body)
    assert response.status == 400
    assert response.headers["Content-Type"] == "application/json"
    assert list(response.json()) == ["error"]
    assert isinstance(response.json()["error"], str)


# Connections


def test_a_connection_outlives_every_refusal_that_read_the_request(wire: Wire) -> None:
    refusals = [
        ("POST", "/api/v1/push", b"{", 400),
        ("POST", "/api/v1/push", b'{"items":[{"queue":"","payload":1}]}', 400),
        ("POST", "/api/v1/nothing", b"x" * 5000, 404),
        ("PUT", "/api/v1/push", b"x" * 5000, 405),
        ("GET", "/api/v1/pop/queue/q?batch=x", b"ignored", 400),
        ("GET", "/api/v1/pop/queue/%ff", b"", 400),
        ("GET", "/api/v1/pop", b"", 400),
        ("POST", "/api/v1/transaction", b'{"operations":1}', 400),
    ]
    for method, path, body, status in refusals:
        wire.send(f"{method} {path} HTTP/1.1\nContent-Length: {len(body)}", body)
        response = wire.receive()
        assert (path, response.status) == (path, status)
        assert "connection" not in response.headers
    wire.send("GET /status HTTP/1.1")
    assert wire.receive().status == 200


def test_pipelined_requests_are_answered_in_order(wire: Wire, name: str) -> None:
    wire.post("/api/v1/push", one_item(name))
    wire.send(f"GET /api/v1/pop/queue/{name} HTTP/1.1")
    wire.send(f"GET /api/v1/pop/queue/{name}?wait=true&timeout=1 HTTP/1.1")
    wire.send("GET /api/v1/nothing HTTP/1.1")
    wire.post("/api/v1/push", b'{"items":[]}')
    answers = [wire.receive() for _ in range(5)]
    assert [answer.status for answer in answers] == [201, 200, 204, 404, 201]
    assert json.loads(answers[1].body)["messages"][0]["data"] == 1


@pytest.mark.parametrize("header", ["close", "Close", "keep-alive, close"])
def test_a_connection_ends_when_the_client_says_so(wire: Wire, header: str) -> None:
    wire.send(f"GET /status HTTP/1.1\nConnection: {header}").send("GET /status HTTP/1.1")
    assert wire.receive().headers["connection"] == "close"
    assert wire.ended()


def test_http_1_0_ends_its_connection_unless_asked_to_keep_it(api: Api) -> None:
    with Wire(api.broker) as wire:
        wire.send("GET /status HTTP/1.0")
        response = wire.receive()
        assert (response.status, response.headers["connection"]) == (200, "close")
        assert wire.ended()
    with Wire(api.broker) as wire:
        for _ in range(2):
            wire.send("GET /status HTTP/1.0\nConnection: keep-alive")
            assert wire.receive().headers["connection"] == "keep-alive"


# Bodies


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_a_body_may_come_in_chunks(wire: Wire, name: str, size: int) -> None:
    for _ in range(2):
        wire.send("POST /api/v1/push HTTP/1.1\nTransfer-Encoding: chunked", chunks(one_item(name), size))
        assert wire.receive().status == 201


def test_chunks_may_have_extensions_and_trailers(wire: Wire, name: str) -> None:
    body = one_item(name)
    coded = b"%x;name=value\r\n%b\r\n0\r\nX-Checksum: 1\r\n\r\n" % (len(body), body)
    wire.send("POST /api/v1/push HTTP/1.1\nTransfer-Encoding: chunked", coded)
    assert wire.receive().status == 201
    wire.send("GET /status HTTP/1.1")
    assert wire.receive().status == 200


def test_a_client_that_expects_100_continue_is_told_to(wire: Wire, name: str) -> None:
    body = one_item(name)
    wire.send(f"POST /api/v1/push HTTP/1.1\nExpect: 100-continue\nContent-Length: {len(body)}")
    assert wire.receive().status == 100
    wire.socket.sendall(body)
    assert wire.receive().status == 201


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size, status", [(CAP - 1, 201), (CAP, 201), (CAP + 1, 413)])
def test_the_cap_is_exact(capped: Broker, size: int, status: int, chunked: bool) -> None:
    body = padded(size)
    with Wire(capped) as wire:
        if chunked:
            wire.send("POST /api/v1/push HTTP/1.1\nTransfer-Encoding: chunked", chunks(body, 300))
        else:
            wire.post("/api/v1/push", body)
        response = wire.receive()
    assert (response.status, response.body) == (status, b"[]" if status == 201 else TOO_LARGE)


@pytest.mark.parametrize("path", [path for path, method in ROUTES.items() if method == "POST"])
def test_every_route_with_a_body_caps_it(capped: Broker, path: str) -> None:
    response = capped.request("POST", path, b" " * (CAP + 1))
    assert (response.status, response.body) == (413, TOO_LARGE)
    assert response.headers["Connection"] == "close"


def test_a_body_that_announces_too_much_is_not_waited_for(capped: Broker) -> None:
    with Wire(capped) as wire:
        wire.send(f"POST /api/v1/push HTTP/1.1\nContent-Length: {10**15}")
        assert wire.receive().status == 413
        assert wire.ended()


def test_a_chunked_body_is_refused_while_it_comes(capped: Broker) -> None:
    with Wire(capped) as wire:
        wire.send("POST /api/v1/push HTTP/1.1\nTransfer-Encoding: chunked", b"ffffffff\r\n" + b" " * 2_000_000)
        assert wire.receive().status == 413


def test_nothing_behind_a_body_that_was_too_large_is_served(capped: Broker, name: str) -> None:
    with Wire(capped) as wire:
        wire.post("/api/v1/push", padded(CAP + 1)).post("/api/v1/push", one_item(name))
        response = wire.receive()
        assert (response.status, response.headers["connection"]) == (413, "close")
        assert wire.ended()
    assert capped.pop(name) == []


def test_the_default_cap_is_64_mib(api: Api, name: str) -> None:
    frame = json.dumps({"items": [{"queue": name, "payload": ""}]}).encode()
    payload = b"x" * (DEFAULT_CAP - len(frame))
    head, tail = frame[:-4], frame[-4:]
    assert len(body := head + payload + tail) == DEFAULT_CAP
    assert api.request("POST", "/api/v1/push", body).json()[0]["status"] == "queued"
    answer = api.request("GET", f"/api/v1/pop/queue/{name}?autoAck=true")
    assert answer.status == 200
    assert b'"data":"' + payload + b'"' in answer.body

    assert api.request("POST", "/api/v1/push", padded(DEFAULT_CAP + 1)).status == 413
    chunked = {"Transfer-Encoding": "chunked"}
    exact = api.broker.request("POST", "/api/v1/push", chunks(padded(DEFAULT_CAP), 1 << 20), chunked)
    assert (exact.status, exact.body) == (201, b"[]")
    more = api.broker.request("POST", "/api/v1/push", chunks(padded(DEFAULT_CAP + 1), 1 << 20), chunked)
    assert more.status == 413


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_ends_early_is_not_taken(api: Api, wire: Wire, name: str, chunked: bool) -> None:
    body = one_item(name)
    if chunked:
        wire.send("POST /api/v1/push HTTP/1.1\nTransfer-Encoding: chunked", b"%x\r\n%b\r\n" % (len(body), body))
    else:
        wire.send(f"POST /api/v1/push HTTP/1.1\nContent-Length: {len(body) + 1}", body)
    wire.socket.shutdown(socket.SHUT_WR)
    assert wire.ended()
    assert api.broker.pop(name) == []


@pytest.mark.parametrize("coded", [b"nonsense\r\n", b"-1\r\n", b"3\r\nabcd\r\n0\r\n\r\n", b"\r\n"])
def test_malformed_chunks_are_the_clients_fault(wire: Wire, coded: bytes) -> None:
    wire.send("POST /api/v1/push HTTP/1.1\nTransfer-Encoding: chunked", coded)
    response = wire.receive()
    assert response.status == 400
    assert json.loads(response.body)["error"].startswith("bad body: ")
    assert wire.ended()


# With an access log the responses go through gunicorn's own writer.


def test_an_access_log_changes_no_answer(brokers: Brokers) -> None:
    broker = brokers({"GUNICORN_CMD_ARGS": "--access-logfile -", "QUEEN_MAX_BODY_BYTES": str(CAP)})
    with Wire(broker) as wire:
        wire.send("GET /api/v1/pop/queue/q HTTP/1.1").send("HEAD /status HTTP/1.1").send("PUT /api/v1/push HTTP/1.1")
        nothing = wire.receive()
        assert nothing.status == 204
        assert not {"content-length", "content-type", "transfer-encoding"} & set(nothing.headers)
        assert wire.receive(has_body=False).status == 200
        refused = wire.receive()
        assert (refused.status, refused.headers["allow"]) == (405, "POST")
        wire.post("/api/v1/push", one_item("q"))
        assert wire.receive().status == 201
        wire.post("/api/v1/push", padded(CAP + 1)).post("/api/v1/push", one_item("q"))
        assert wire.receive().status == 413
        assert wire.ended()
    assert len(broker.pop("q")) == 1
    assert '"POST /api/v1/push HTTP/1.1" 413' in broker.log()


# The graceful stop


def test_a_stop_answers_parked_pops_and_waits_for_no_idle_connection(brokers: Brokers) -> None:
    broker = brokers()
    with Wire(broker) as idle:
        paths = ["/queue/q?", "/queue/q/partition/p?", "?namespace=q&"]
        parked = [Wire(broker).send(f"GET /api/v1/pop{path}wait=true&timeout=60000 HTTP/1.1") for path in paths]
        for _ in range(3):  # what comes later has been served
            idle.send("GET /health HTTP/1.1")
            assert idle.receive().status == 200
        os.kill(broker.pid, signal.SIGTERM)
        for wire in parked:
            with wire:
                response = wire.receive()
                assert (response.status, response.headers["connection"]) == (204, "close")
        wait_until(lambda: not broker.running, 5, "the broker has stopped")
        assert broker.stop() == 0
        assert idle.ended()


def test_a_stop_lets_a_push_in_flight_finish(broker: Broker, database: Database) -> None:
    broker.push([{"queue": "q", "payload": 1}])
    with ThreadPoolExecutor() as pool, database.connect() as sql, database.connect() as watch:
        with sql.transaction():
            sql.execute("SELECT FROM queen.log_partitions FOR UPDATE")
            push = pool.submit(broker.push, [{"queue": "q", "payload": 2}])
            wait_until(lambda: watch.execute(WAITING).fetchone(), what="the push waits for the row")
            os.kill(broker.pid, signal.SIGTERM)
            wait_until(lambda: "draining in-flight requests" in broker.log(), what="the worker heard it")
            assert broker.running
        assert push.result()[0]["status"] == "queued"
        wait_until(lambda: not broker.running, 10, "the broker has stopped")
        assert watch.execute("SELECT last_offset FROM queen.log_partitions").fetchone() == (1,)
