"""POST /api/v1/push."""

from __future__ import annotations

import msgspec
from flask import Blueprint

from queen.api.answers import Answer, Refusal
from queen.api.bodies import Decoder, check_id, check_item, check_names
from queen.api.http import Request, direct
from queen.engine.admission import Overloaded
from queen.engine.encryption import QueueEncrypted
from queen.engine.push import FAILED, Item

blueprint = Blueprint("push", __name__)


class Body(msgspec.Struct):
    items: list[Item]


_decoder = Decoder(Body)
_encode = msgspec.json.Encoder().encode


def read(body: bytes) -> list[Item]:
    """The items of a body, checked as a whole: one bad item refuses them all."""
    decoded, masks = _decoder.decode(body)
    # A control character or a surrogate can only be written as an escape.
    escaped = b"\\" in body
    queue = partition = None
    for position, item in enumerate(decoded.items):
        if item.queue != queue or item.partition != partition:
            queue, partition = item.queue, item.partition
            check_item(position, queue, partition)
        check_id(position, item.transaction_id)
        if escaped:
            check_names(masks, queue, partition, item.transaction_id)
            if masks is not None:
                item.payload = msgspec.Raw(masks.restore(bytes(item.payload)))
    return decoded.items


@blueprint.post("/api/v1/push")
@direct
def push(request: Request) -> Answer:
    body = request.body()
    pusher, intake = request.engine.pusher, request.spool.intake
    try:
        with pusher.admission.admit(len(body)):
            items = read(body)
            if not items:
                return Answer(201, b"[]")
            diverted = intake.diverts
            outcomes = intake.push(request.tenant, items, request.subject)
            request.engine.counters.pushed(request.tenant, outcomes)
            status = 500 if diverted and any(outcome.status == FAILED for outcome in outcomes) else 201
            return Answer(status, _encode(outcomes))
    except QueueEncrypted as error:
        raise Refusal(400, str(error)) from None
    except Overloaded as error:
        raise Refusal(503, str(error)) from None
