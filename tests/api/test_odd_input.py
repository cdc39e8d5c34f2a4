"""Odd input: the right status, a worker that lives on, and other clients that notice nothing."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from tests.api.conftest import Api, segment

PUSH = "/api/v1/push"
NEIGHBOURS = 6


@pytest.fixture(autouse=True)
def undisturbed(api: Api, name: str) -> Iterator[None]:
    """Before, during and after each test other clients push and are served by the same worker."""
    worker = api.broker.worker_pids()
    queue = f"{name}-neighbour"
    api.broker.push([{"queue": queue, "payload": "before"}])
    yield
    api.broker.push([{"queue": queue, "payload": "after"}])
    messages = api.broker.pop(queue)
    assert [message["data"] for message in messages] == ["before", "after"]
    assert [api.broker.ack(message)["success"] for message in messages] == [True, True]
    assert api.broker.worker_pids() == worker
    assert "Traceback" not in api.broker.log()


def among_others(api: Api, name: str, raw: bytes, target: str = PUSH) -> tuple[int, bytes]:
    """Send a request while others push to the same partition; return its status and body."""
    with ThreadPoolExecutor(NEIGHBOURS + 1) as pool:
        goods = [pool.submit(api.broker.push, [{"queue": name, "payload": n}]) for n in range(NEIGHBOURS)]
        odd = pool.submit(api.request, "POST", target, raw)
        assert [good.result()[0]["status"] for good in goods] == ["queued"] * NEIGHBOURS
    response = odd.result()
    return response.status, response.body


def refused(api: Api, name: str, raw: bytes) -> str:
    """Return the error of a push that is refused, while those of others are not."""
    status, body = among_others(api, name, raw)
    assert status == 400, body
    answer = json.loads(body)
    assert list(answer) == ["error"]
    messages = api.broker.pop(name)
    assert sorted(message["data"] for message in messages) == list(range(NEIGHBOURS))
    return str(answer["error"])


def item(name: str, payload: bytes = b"1", **fields: bytes) -> bytes:
    """A body of one item; the fields are JSON already."""
    more = b"".join(b',"%b":%b' % (key.encode(), value) for key, value in fields.items())
    return b'{"items":[{"queue":"%b","payload":%b%b}]}' % (name.encode(), payload, more)


# Payloads: whatever is JSON comes back as it was sent.


@pytest.mark.parametrize(
    "payload",
    [
        b"1e400",
        b"-1e400",
        b"1e-400",
        b"-0.0",
        b"0e0",
        b"1" + b"0" * 400,
        b"0." + b"1" * 400,
        b"1E+2",
        b'{"a":1,"a":2,"a":{"b":[],"b":[]}}',
        rb'"\ud800"',
        rb'"\udfff\ud800"',
        rb'"\ud800\ud800\udc00"',
        rb'"\\ud800 \\\ud800 \uD83D\uDE00\uDAFF"',
        rb'{"\ud800":"\u0000","\u0000":"\udc00"}',
        rb'["\ud800","\ue000","\uE001"]',
        '["\ue000\uf8ff",'.encode() + rb'"\ud800"]',
        rb'"\u0000\u0001\b\f\n\r\t\"\/\\"',
        b'"\x7f"',
        '"\u0080\u2028\u2029\ufeff\ufffe\uffff\U0010ffff"'.encode(),
        b"[" * 500 + b"]" * 500,
        b'{"a":' * 500 + b"1" + b"}" * 500,
        b" [ 1 , 2 ] ",
        b"[]",
        b"{}",
        b'""',
        b"false",
    ],
)
def test_a_payload_survives_push_pop_and_dead_letter_queue(api: Api, name: str, payload: bytes) -> None:
    status, body = among_others(api, name, item(f"{name}-odd", payload))
    assert status == 201, body
    kept = payload.strip()
    popped = api.request("GET", f"/api/v1/pop/queue/{name}-odd")
    assert b'"data":' + kept + b',"producerSub"' in popped.body

    head = popped.body.partition(b'"data":')[0] + b'"data":0' + popped.body[popped.body.rindex(b',"producerSub"') :]
    (message,) = json.loads(head)["messages"]
    assert api.broker.ack(message, "dlq", error="odd")["dlq"] is True
    assert b'"data":' + kept + b"}" in api.request("GET", f"/api/v1/dlq?queue={name}-odd").body


def test_every_unpaired_surrogate_survives(api: Api, name: str) -> None:
    payload = b'"' + b"".join(b"\\u%04x " % code for code in range(0xD800, 0xE000)) + b'"'
    assert api.request("POST", PUSH, item(name, payload)).status == 201
    assert b'"data":' + payload + b"," in api.request("GET", f"/api/v1/pop/queue/{name}").body


def test_a_large_payload_of_escapes_survives(api: Api, name: str) -> None:
    payload = b'"' + rb"\ud83d\ude00\u0000\ud800" * 50_000 + b'"'
    assert api.request("POST", PUSH, item(name, payload)).status == 201
    assert b'"data":' + payload + b"," in api.request("GET", f"/api/v1/pop/queue/{name}").body


@pytest.mark.parametrize(
    "payload",
    [
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"nan",
        b"inf",
        b'{"a":[NaN]}',
        b"[1,Infinity]",
        b"01",
        b"1.",
        b".5",
        b"+1",
        b"-",
        b"1e",
        b"0x10",
        b"1_000",
        b"",
        b"nul",
        b"True",
        b"[1,]",
        b"[,1]",
        b"[1 2]",
        b'{"a"}',
        b'{"a":1,}',
        b"{a:1}",
        b"{1:1}",
        b"'a'",
        b'"a\nb"',
        b'"a\x00b"',
        b'"a\x1fb"',
        rb'"\x41"',
        rb'"\u12"',
        rb'"\u12g4"',
        rb'"\ud800\u12"',
        b'"a',
        b"[",
        b"]",
        b"/*a*/1",
        b"1//a",
        b'"\xff"',
        b'"\xc0\xaf"',
        b'"\xed\xa0\x80"',
        b'"\xf4\x90\x80\x80"',
        b'"\xe2\x82"',
        b"\xc2\xa01",
        b"\x0c1",
        b"[" * 10_000 + b"]" * 10_000,
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b"[" * 1_000_000,
    ],
    ids=lambda payload: repr(payload[:20]),
)
def test_a_payload_that_is_no_json_is_refused(api: Api, name: str, payload: bytes) -> None:
    assert refused(api, name, item(f"{name}-odd", payload)).startswith("bad body: ")
    assert api.count("queues", "name = %s", f"{name}-odd") == 0


# Bodies


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b" ",
        b"\x00",
        b'\xef\xbb\xbf{"items":[]}',
        '{"items":[]}'.encode("utf-16"),
        '{"items":[]}'.encode("utf-16-le"),
        b'{"items":[]}\x00',
        b'{"items":[]}{"items":[]}',
        b'{"items":[]',
        b"items=%5B%5D",
        b"<items/>",
        b"\xff\xfe",
        b'{"items":[],"x":NaN}',
        b'{"items":[],"x":"\xff"}',
        b'{"items":[],"x":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"x":"\\ud800","items":[{"queue":"q"}]}',
        b'{"x":"\\ud800","items":' + b"[" * 10_000,
    ],
    ids=lambda raw: repr(raw[:20]),
)
def test_a_body_that_is_no_json_is_refused(api: Api, name: str, raw: bytes) -> None:
    assert refused(api, name, raw).startswith("bad body: ")


@pytest.mark.parametrize(
    "raw",
    [
        b'{"items":[]}',
        b'\n\t {"items" : [ ] } \r\n',
        b'{"items":[],"x":1e400,"y":"\\ud800\\u0000","z":' + b"9" * 400 + b"}",
        b'{"\\u0069tems":[]}',
        b'{"items":[1],"items":[]}'.replace(b"[1]", b'[{"queue":"q","payload":1}]'),
    ],
)
def test_an_odd_body_that_is_json_is_taken(api: Api, name: str, raw: bytes) -> None:
    assert among_others(api, name, raw) == (201, b"[]")


def test_a_good_item_is_not_written_beside_a_bad_one(api: Api, name: str) -> None:
    good = json.dumps({"queue": f"{name}-odd", "payload": 1}).encode()
    bad = json.dumps({"queue": f"{name}-odd", "data": 1}).encode()
    refused(api, name, b'{"items":[' + b",".join([good, good, bad, good]) + b"]}")
    assert api.count("queues", "name = %s", f"{name}-odd") == 0


def test_many_small_items_are_many_messages(api: Api, name: str) -> None:
    results = api.broker.push([{"queue": name, "partition": str(n % 100), "payload": n} for n in range(20_000)])
    assert {result["status"] for result in results} == {"queued"}
    messages = api.broker.pop(name, partitions=64, batch=2**31 - 1)
    assert len(messages) == 64 * 200


# Names and ids


@pytest.mark.parametrize("field", ["queue", "partition", "transactionId"])
@pytest.mark.parametrize("text", [rb"\u0000", rb"a\u001f", rb"\n", rb"\ud800", rb"a\udc00b", rb"\ude00\ud83d"])
def test_a_name_that_can_be_none_is_refused(api: Api, name: str, field: str, text: bytes) -> None:
    raw = b'{"items":[{"queue":"%b","partition":"p","transactionId":"t","payload":1}]}' % f"{name}-odd".encode()
    value = {"queue": f"{name}-odd", "partition": "p", "transactionId": "t"}[field].encode()
    odd = raw.replace(b'"%b":"%b"' % (field.encode(), value), b'"%b":"%b"' % (field.encode(), text))
    assert refused(api, name, odd).startswith("bad body: ")
    assert api.count("queues", "name = %s", f"{name}-odd") == 0


@pytest.mark.parametrize("character", ["x", "ü", "\u4e2d", "\U0001f600", "\U0010ffff", "\ufeff", "\u202e", "\x7f", " "])
def test_names_are_counted_in_characters(api: Api, name: str, character: str) -> None:
    for field in ("queue", "partition"):
        names = {"queue": f"{name}-{field}", "partition": "p"}
        names[field] += character * (255 - len(names[field]))
        (result,) = api.broker.push([{**names, "payload": 1}])
        assert result["status"] == "queued"
        (message,) = api.broker.pop(**names)
        assert api.broker.ack(message)["success"] is True

        names[field] += character
        error = refused(api, f"{name}-{field}-others", json.dumps({"items": [{**names, "payload": 1}]}).encode())
        assert error == f"bad body: {field} of item 0 exceeds 255 characters"


@pytest.mark.parametrize("character", ["x", "ü", "\u4e2d", "\U0001f600"])
def test_transaction_ids_are_counted_in_bytes(api: Api, name: str, character: str) -> None:
    size = len(character.encode())
    longest = character * (65_535 // size) + "x" * (65_535 % size)
    assert len(longest.encode()) == 65_535
    raw = json.dumps({"items": [{"queue": f"{name}-odd", "payload": 1, "transactionId": longest}]}, ensure_ascii=False)
    assert among_others(api, name, raw.encode())[0] == 201
    error = refused(api, f"{name}-2", raw.replace(longest, f"{longest}x").encode())
    assert error == "bad body: transactionId of item 0 exceeds the 65535-byte limit"
    (message,) = api.broker.pop(f"{name}-odd")
    assert message["transactionId"] == longest
    assert api.broker.ack(message)["success"] is True


def test_names_that_look_alike_are_different(api: Api, name: str) -> None:
    texts = ["a", "A", "a ", "\u0430", "\xe9", "e\u0301", "a\u200b", "a\u0000"[:1] + ".", "%61", "a/", "a\\"]
    api.broker.push([{"queue": name, "partition": text, "payload": text} for text in texts])
    for text in texts:
        assert [message["data"] for message in api.broker.pop(name, text)] == [text]


def test_names_cannot_speak_sql_or_json(api: Api, name: str) -> None:
    texts = ["'; DROP TABLE queen.queues; --", '"', "{}", "{a,b}", "NULL", "\\", "\\x00", "$1", "%s", "a\\u0000b", ","]
    for text in texts:
        item = {"queue": f"{name}{text}", "partition": text, "transactionId": text, "payload": text}
        api.broker.push([item])
        (message,) = api.broker.pop(f"{name}{text}", text, consumerGroup=text, subscriptionMode="all")
        assert (message["data"], message["transactionId"], message["consumerGroup"]) == (text, text, text)
        assert api.broker.ack(message, consumerGroup=text, error=text)["success"] is True
        target = f"/api/v1/pop/queue/{segment(name + text)}?consumerGroup=o&subscriptionFrom={segment(text)}"
        assert api.request("GET", target).status in (200, 204)


# Every other route that reads a body


@pytest.mark.parametrize(
    "target", ["/api/v1/ack", "/api/v1/ack/batch", "/api/v1/transaction", "/api/v1/lease/l/extend", "/api/v1/configure"]
)
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x00",
        b"\xff\xff",
        b"[" * 1_000_000,
        b'{"a":' * 100_000,
        b'{"x":NaN}',
        b'{"operations":NaN,"acknowledgments":[NaN],"seconds":Infinity,"queue":"q","error":-Infinity}',
        b'{"transactionId":"\\ud800","operations":[{"type":"ack","transactionId":"\\ud800"}],'
        b'"acknowledgments":[{"transactionId":"\\ud800"}]}',
        b'{"operations":[{"type":"push","queue":"q","payload":' + b"[" * 10_000 + b"]" * 10_000 + b"}]}",
    ],
    ids=lambda raw: repr(raw[:20]),
)
def test_odd_bodies_are_the_clients_fault_everywhere(api: Api, name: str, target: str, raw: bytes) -> None:
    status, body = among_others(api, name, raw, target)
    if "extend" in target:
        assert (status, json.loads(body)["success"]) == (200, False)
    else:
        assert status == 400, body
        assert isinstance(json.loads(body)["error"], str)


@pytest.mark.parametrize(
    "raw", [b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"\r\n\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x00" * 10_000]
)
def test_what_is_no_http_is_answered_or_hung_up_on(api: Api, raw: bytes) -> None:
    with api.broker.connect(20) as client:
        answer = b""
        with suppress(OSError):
            client.sendall(raw)
            client.shutdown(socket.SHUT_WR)
        with suppress(OSError):
            while part := client.recv(65536):
                answer += part
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize(
    "header",
    [
        "Content-Length: -1",
        "Content-Length: +1",
        "Content-Length: 1e3",
        "Content-Length: 1\r\nContent-Length: 2",
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: nonsense",
        "X" * 20_000 + ": 1",
        "Bad Header: 1",
        "\r\n".join(f"H{n}: 1" for n in range(500)),
    ],
    ids=lambda header: header[:30],
)
def test_headers_that_mislead_are_refused(api: Api, header: str) -> None:
    with api.broker.connect(20) as client:
        client.sendall(f"POST {PUSH} HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n".encode())
        answer = client.recv(65536)
    status: Any = answer.split()[1:2]
    assert status[0][:1] in (b"4", b"5"), answer
    assert status != [b"500"]
