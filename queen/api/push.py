"""POST /api/v1/push."""

from __future__ import annotations

import msgspec
from flask import Blueprint

from queen.api.bodies import Decoder, check_item, check_names
from queen.api.http import Answer, Request, direct
from queen.engine.push import Item

DEFAULT_PARTITION = "Default"

blueprint = Blueprint("push", __name__)


class PushItem(msgspec.Struct):
    queue: str
    payload: msgspec.Raw
    partition: str | None = None
    transactionId: str | None = None


class PushBody(msgspec.Struct):
    items: list[PushItem]


class PushResult(msgspec.Struct):
    """One element of the answer; the mixed spelling is the contract."""

    index: int
    message_id: str
    transaction_id: str
    queueName: str
    status: str


_decoder = Decoder(PushBody)
_encode = msgspec.json.Encoder().encode


def read(body: bytes) -> tuple[list[Item], list[PushItem]]:
    """The items of a body, checked as a whole: one bad item refuses them all."""
    decoded, masks = _decoder.decode(body)
    # A control character or a surrogate can only be written as an escape.
    escaped = b"\\" in body
    items: list[Item] = []
    for position, item in enumerate(decoded.items):
        queue, partition, transaction_id = item.queue, item.partition, item.transactionId
        check_item(position, queue, partition, transaction_id)
        payload = bytes(item.payload)
        if escaped:
            check_names(masks, queue, partition, transaction_id)
            if masks is not None:
                payload = masks.restore(payload)
        items.append(
            Item(
                queue.encode(),
                (DEFAULT_PARTITION if partition is None else partition).encode(),
                payload,
                None if transaction_id is None else transaction_id.encode(),
            )
        )
    return items, decoded.items


@blueprint.post("/api/v1/push")
@direct
def push(request: Request) -> Answer:
    items, sent = read(request.body())
    if not items:
        return Answer(201, b"[]")
    outcomes = request.engine.pusher.push(request.tenant, items, request.subject)
    results = [
        PushResult(position, o.message_id, o.transaction_id.decode(), item.queue, o.status)
        for position, (o, item) in enumerate(zip(outcomes, sent, strict=True))
    ]
    return Answer(201, _encode(results))
