"""POST /api/v1/ack and POST /api/v1/ack/batch."""

from __future__ import annotations

import msgspec
from flask import Blueprint

from queen.api.answers import Answer
from queen.api.bodies import Decoder, Masks, check_group, check_surrogates
from queen.api.http import Request, direct
from queen.engine.ack import AckItem
from queen.engine.identifiers import QUEUE_MODE

blueprint = Blueprint("ack", __name__)


class AckBatch(msgspec.Struct):
    acknowledgments: list[AckItem] = []
    consumerGroup: str | None = None


class AckResult(msgspec.Struct, gc=False):
    """One element of the answer."""

    index: int
    transactionId: str
    success: bool
    error: str | None
    leaseReleased: bool
    dlq: bool
    noop: bool


_single = Decoder(AckItem)
_batch = Decoder(AckBatch)
_encode = msgspec.json.Encoder().encode


@blueprint.post("/api/v1/ack")
@direct
def ack(request: Request) -> Answer:
    item, masks = _single.decode(request.body())
    return _ack(request, [item], item.group, masks)


@blueprint.post("/api/v1/ack/batch")
@direct
def ack_batch(request: Request) -> Answer:
    body, masks = _batch.decode(request.body())
    return _ack(request, body.acknowledgments, body.consumerGroup, masks)


def _ack(request: Request, items: list[AckItem], group: str | None, masks: Masks | None) -> Answer:
    group = QUEUE_MODE if group is None else group
    check_group(group)
    for item in items:
        item.group = group  # an item of a batch has none of its own
        if masks is not None:
            unmask(item, masks)
    results = request.engine.acker.ack(request.tenant, items)
    request.engine.counters.acked(items, results)
    return Answer(
        200,
        _encode(
            [
                AckResult(k, item.transaction_id, r.success, r.error, r.released, r.dlq, r.noop)
                for k, (item, r) in enumerate(zip(items, results, strict=True))
            ]
        ),
    )


def unmask(item: AckItem, masks: Masks) -> None:
    """Makes an item's reason readable again, where it had half a character.

    Raises a 400 `Refusal` for an id with an unpaired surrogate, since no message can have it.
    """
    check_surrogates(masks, item.transaction_id, item.partition_id, item.lease_id, item.status, item.group)
    item.error = masks.readable(item.error) if item.error else None
