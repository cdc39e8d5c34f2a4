"""What is sent: payloads, transaction ids and whole HTTP requests, joined from prebuilt bytes.

Encoding a message with a JSON library while the clock runs would make the generator the bottleneck,
so a message is four pieces: the head of its partition, the random part of its id, a counter, and the
tail with its payload.
"""

from __future__ import annotations

import json
import random
import uuid
from itertools import count
from urllib.parse import quote, urlencode

POOL = 1021  # distinct payloads; a prime, so that they don't fall into step with the partitions

_FIRST_NAMES = (
    "Ada Aiko Amir Anna Boris Carmen Chidi Dana Elif Emeka Femke Grace Hana Ivan Jomo Kaito Lena Luis "
    "Maja Nadia Nils Olga Pedro Qiang Rosa Sanjay Tariq Uma Viktor Wanjiru Ximena Yusuf Zoe"
).split()
_LAST_NAMES = (
    "Abe Banerjee Castillo Dubois Eriksen Fischer Garcia Haddad Ito Jansen Kowalski Lindqvist Moreau "
    "Nguyen Okafor Petrov Quispe Rossi Sato Tanaka Ueda Varga Weber Xu Yilmaz Zhang"
).split()
_WORDS = (
    "invoice order basket parcel refund express warehouse pending customer address window delivery "
    "signed counter north harbour copper lantern velvet garden monthly balance credit ledger transfer "
    "morning battery sensor pressure valve station ticket platform seat meadow river printer paper "
    "glass bottle coffee roasted grinder filter saddle wheel spoke chain bridge tunnel signal"
).split()
_KINDS = ("order.placed", "order.paid", "parcel.sent", "refund.asked", "address.changed")


def make_payload(rng: random.Random, size: int) -> bytes:
    """One JSON object of about `size` bytes that looks like a business event."""
    record: dict[str, object] = {}

    def text() -> bytes:
        return json.dumps(record, separators=(",", ":")).encode()

    fields: list[tuple[str, object]] = [
        ("id", f"{rng.getrandbits(48):012x}"),
        ("type", rng.choice(_KINDS)),
        ("customer", f"{rng.choice(_FIRST_NAMES)} {rng.choice(_LAST_NAMES)}"),
        ("amount", round(rng.uniform(1, 5000), 2)),
        ("items", rng.randint(1, 40)),
        ("at", 1_760_000_000_000 + rng.getrandbits(34)),
    ]
    for name, value in fields:
        record[name] = value
        if len(text()) > size:
            del record[name]
    note: list[str] = []
    record["note"] = ""
    room = size - len(text())
    if room < 0:
        del record["note"]
        return text()
    while sum(map(len, note)) + len(note) <= room:
        note.append(rng.choice(_WORDS) if rng.random() < 0.8 else str(rng.randint(10, 99_999)))
    record["note"] = " ".join(note)[:room]
    return text()


class Target:
    """The broker's address and the constant parts of every request to it."""

    def __init__(self, host: str, port: int, token: str | None = None) -> None:
        self.host = host
        self.port = port
        head = f"Host: {host}:{port}\r\n"
        self.headers: dict[str, str] = {}
        if token:
            self.headers["Authorization"] = f"Bearer {token}"
            head += f"Authorization: Bearer {token}\r\n"
        self._head = head.encode()
        self._body_head = self._head + b"Content-Type: application/json\r\nContent-Length: "

    def get(self, path: str, method: str = "GET") -> bytes:
        """A request without a body."""
        return f"{method} {path} HTTP/1.1\r\n".encode() + self._head + b"\r\n"

    def post_line(self, path: str) -> bytes:
        """Everything of a POST up to the number of its body's bytes; see `with_body`."""
        return f"POST {path} HTTP/1.1\r\n".encode() + self._body_head


def with_body(post_line: bytes, body: bytes) -> bytes:
    """A POST with its body."""
    return b"%b%d\r\n\r\n%b" % (post_line, len(body), body)


class Messages:
    """Makes push requests for one queue; every message has its own transactionId."""

    def __init__(self, target: Target, queue: str, partitions: int, payload: int, seed: int) -> None:
        rng = random.Random(seed)
        self.queue = queue
        self.partitions = partitions
        self._line = target.post_line("/api/v1/push")
        self._counter = count()
        name = json.dumps(queue)
        self._heads = [f'{{"queue":{name},"partition":"p{n}","transactionId":"'.encode() for n in range(partitions)]
        # Ids are random between runs and unlike each other inside one: uuid4 but for its last block.
        ids = random.Random(uuid.uuid4().int)
        self._ids = [str(uuid.UUID(int=ids.getrandbits(128), version=4))[:24].encode() for _ in range(POOL)]
        payloads = [make_payload(rng, payload) for _ in range(POOL)]
        self.payload_bytes = sum(map(len, payloads)) / POOL
        self._tails = [b'","payload":%b}' % body for body in payloads]

    def push(self, partition: int, batch: int) -> tuple[int, bytes]:
        """The number of the first message and the request that pushes `batch` of them."""
        counter, ids, tails = self._counter, self._ids, self._tails
        head = self._heads[partition]
        first = next(counter)
        items = [b"%b%b%012x%b" % (head, ids[first % POOL], first, tails[first % POOL])]
        for _ in range(batch - 1):
            n = next(counter)
            slot = n % POOL
            items.append(b"%b%b%012x%b" % (head, ids[slot], n, tails[slot]))
        return first, with_body(self._line, b'{"items":[%b]}' % b",".join(items))

    def ids(self, first: int, batch: int) -> list[str]:
        """The transactionIds of a push, in order."""
        return [f"{self._ids[n % POOL].decode()}{n:012x}" for n in range(first, first + batch)]


class Consumption:
    """Makes the pop and ack requests of one consumer group on one queue."""

    def __init__(self, target: Target, queue: str, group: str, batch: int, wait_ms: int) -> None:
        self.group = group
        query: dict[str, str | int] = {
            "consumerGroup": group,
            "subscriptionMode": "all",
            "batch": batch,
            "partitions": 1,
        }
        if wait_ms:
            query |= {"wait": "true", "timeout": wait_ms}
        self.pop = target.get(f"/api/v1/pop/queue/{quote(queue, safe='')}?{urlencode(query)}")
        self._group = json.dumps(group)
        self._one = target.post_line("/api/v1/ack")
        self._many = target.post_line("/api/v1/ack/batch")
        self._many_start = f'{{"consumerGroup":{self._group},"acknowledgments":[{{"transactionId":"'

    def ack(self, partition_id: str, lease_id: str, ids: list[str], single: bool) -> bytes:
        """Acknowledge messages of one partition: on the single route, or on the batch route."""
        if single and len(ids) == 1:
            body = (
                f'{{"transactionId":"{ids[0]}","partitionId":"{partition_id}","status":"completed",'
                f'"consumerGroup":{self._group},"leaseId":"{lease_id}"}}'
            )
            return with_body(self._one, body.encode())
        tail = f'","partitionId":"{partition_id}","status":"completed","leaseId":"{lease_id}"}}'
        joined = (tail + ',{"transactionId":"').join(ids)
        return with_body(self._many, f"{self._many_start}{joined}{tail}]}}".encode())
