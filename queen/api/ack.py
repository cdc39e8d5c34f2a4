"""POST /api/v1/ack and POST /api/v1/ack/batch."""

from __future__ import annotations

import msgspec
from flask import Blueprint

from queen.api.bodies import Decoder, check_group
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
    body, _ = _single.decode(request.body())
    return _ack(request, [body], body.consumerGroup)


@blueprint.post("/api/v1/ack/batch")
@direct
def ack_batch(request: Request) -> Answer:
    body, _ = _batch.decode(request.body())
    return _ack(request, body.acknowledgments, body.consumerGroup)


def ack_item(ack: Ack, group: str) -> AckItem:
    """The item as the engine takes it. A NUL can be in no lease id and no reason that a row could hold."""
    return AckItem(
        ack.transactionId,
        ack.partitionId,
        group,
        (ack.leaseId or "").replace("\x00", "\ufffd"),
        ack.status,
        ack.error.replace("\x00", "\ufffd") if ack.error else None,
    )


def _ack(request: Request, acks: list[Ack] | list[SingleAck], group: str | None) -> Answer:
    group = QUEUE_MODE if group is None else group
    check_group(group)
    results = request.engine.acker.ack(request.tenant, [ack_item(a, group) for a in acks])
    return Answer(
        200,
        _encode(
            [
                AckResult(k, a.transactionId, r.success, r.error, r.released, r.dlq, r.noop)
                for k, (a, r) in enumerate(zip(acks, results, strict=True))
            ]
        ),
    )
