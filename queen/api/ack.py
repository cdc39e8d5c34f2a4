"""POST /api/v1/ack and POST /api/v1/ack/batch."""

from __future__ import annotations

import msgspec
from flask import Blueprint

from queen.api.bodies import Decoder, Masks, check_group, check_surrogates
from queen.api.http import Answer, Request, direct
from queen.engine.ack import AckItem
from queen.engine.identifiers import QUEUE_MODE

blueprint = Blueprint("ack", __name__)


class Ack(msgspec.Struct):
    transactionId: str = ""
    partitionId: str = ""
    status: str | None = None
    leaseId: str | None = None
    error: str | None = None


class SingleAck(Ack):
    consumerGroup: str | None = None


class AckBatch(msgspec.Struct):
    acknowledgments: list[Ack] = []
    consumerGroup: str | None = None


class AckResult(msgspec.Struct):
    """One element of the answer."""

    index: int
    transactionId: str
    success: bool
    error: str | None
    leaseReleased: bool
    dlq: bool
    noop: bool


_single = Decoder(SingleAck)
_batch = Decoder(AckBatch)
_encode = msgspec.json.Encoder().encode


@blueprint.post("/api/v1/ack")
@direct
def ack(request: Request) -> Answer:
    body, masks = _single.decode(request.body())
    return _ack(request, [body], body.consumerGroup, masks)


@blueprint.post("/api/v1/ack/batch")
@direct
def ack_batch(request: Request) -> Answer:
    body, masks = _batch.decode(request.body())
    return _ack(request, body.acknowledgments, body.consumerGroup, masks)


def ack_item(ack: Ack, group: str, masks: Masks | None) -> AckItem:
    """The item as the engine takes it: no row could hold a NUL, nor a reason with half a character.

    Raises a 400 `Refusal` for an id with an unpaired surrogate, since no message can have it.
    """
    reason = ack.error
    if masks is not None:
        check_surrogates(masks, ack.transactionId, ack.partitionId, ack.leaseId, ack.status, group)
        reason = masks.readable(reason) if reason else None
    return AckItem(
        ack.transactionId,
        ack.partitionId,
        group,
        (ack.leaseId or "").replace("\x00", "\ufffd"),
        ack.status,
        reason.replace("\x00", "\ufffd") if reason else None,
    )


def _ack(request: Request, acks: list[Ack] | list[SingleAck], group: str | None, masks: Masks | None) -> Answer:
    group = QUEUE_MODE if group is None else group
    check_group(group)
    items = [ack_item(a, group, masks) for a in acks]
    results = request.engine.acker.ack(request.tenant, items)
    return Answer(
        200,
        _encode(
            [
                AckResult(k, a.transactionId, r.success, r.error, r.released, r.dlq, r.noop)
                for k, (a, r) in enumerate(zip(acks, results, strict=True))
            ]
        ),
    )
