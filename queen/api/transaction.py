"""POST /api/v1/transaction."""

from __future__ import annotations

from typing import Any

import msgspec
from flask import Blueprint

from queen.api.ack import unmask
from queen.api.answers import Answer, Refusal, json_answer
from queen.api.bodies import Decoder, Masks, check_group, check_id, check_item, check_names
from queen.api.http import Request, direct
from queen.db.errors import StatementFailed, Unavailable
from queen.engine.ack import AckItem
from queen.engine.encryption import QueueEncrypted
from queen.engine.identifiers import QUEUE_MODE, Minter, parse_uuid
from queen.engine.push import DEFAULT_PARTITION
from queen.engine.transaction import Push, TransactionRefused

blueprint = Blueprint("transaction", __name__)

NO_OPERATIONS = "transaction requires an operations array (or a top-level kv/timers array)"
ONLY_PUSH_AND_ACK = "segments transaction supports only push and ack operations, got "

_minter = Minter()


class Body(msgspec.Struct):
    operations: msgspec.Raw = msgspec.Raw(b"")
    requiredLeases: Any = None


class Operation(msgspec.Struct):
    """Either kind of operation; a push without an ``items`` array is its own item."""

    type: Any = None
    items: msgspec.Raw = msgspec.Raw(b"")
    queue: Any = None
    partition: Any = None
    payload: msgspec.Raw = msgspec.Raw(b"")
    data: msgspec.Raw = msgspec.Raw(b"")
    transactionId: Any = None
    traceId: msgspec.Raw = msgspec.Raw(b"")
    partitionId: Any = None
    status: Any = None
    consumerGroup: Any = None
    leaseId: Any = None
    error: Any = None


_body = Decoder(Body)
_operations = Decoder(list[Operation])


class Bundle:
    """A transaction's flattened operations: pushes and acks with their places in the answer."""

    def __init__(self) -> None:
        self.pushes: list[Push] = []
        self.acks: list[AckItem] = []
        self.order: list[tuple[str, int]] = []  # kind, position among its kind
        self.leases: list[str] = []

    def add_push(self, item: Operation, masks: Masks | None) -> None:
        queue = item.queue if isinstance(item.queue, str) else ""
        partition = item.partition if isinstance(item.partition, str) else DEFAULT_PARTITION
        key = item.transactionId if isinstance(item.transactionId, str) and item.transactionId else None
        check_item(len(self.order), queue, partition)
        check_id(len(self.order), key)
        check_names(masks, queue, partition, key)
        payload = bytes(item.payload) or bytes(item.data) or b"{}"
        trace = bytes(item.traceId).strip(b'"')  # whatever is no UUID in a string is ignored
        self.order.append(("push", len(self.pushes)))
        self.pushes.append(
            Push(
                queue.encode(),
                partition.encode(),
                payload if masks is None else masks.restore(payload),
                None if key is None else key.encode(),
                parse_uuid(trace.decode())
                if len(item.traceId) > len(trace) and trace.replace(b"-", b"").isalnum()
                else None,
            )
        )

    def add_ack(self, ack: Operation, masks: Masks | None) -> None:
        fields = (ack.transactionId, ack.partitionId, ack.status, ack.consumerGroup, ack.leaseId, ack.error)
        if not all(field is None or isinstance(field, str) for field in fields):
            raise Refusal(400, "bad body: the fields of an ack are strings")
        group = ack.consumerGroup or QUEUE_MODE
        check_group(group)
        item = AckItem(ack.transactionId or "", ack.partitionId or "", group, ack.leaseId, ack.status, ack.error)
        if masks is not None:
            unmask(item, masks)
        self.order.append(("ack", len(self.acks)))
        self.acks.append(item)
        if item.lease_id:
            self.leases.append(item.lease_id)


@blueprint.post("/api/v1/transaction")
@direct
def transaction(request: Request) -> Answer:
    call_id = _minter.mint_text()
    try:
        bundle = read(request.body())
    except TransactionRefused as error:
        return _failure(call_id, error, 400)
    try:
        done = request.engine.transactor.commit(
            request.tenant, bundle.pushes, bundle.acks, bundle.leases, request.subject
        )
    except QueueEncrypted as error:
        raise Refusal(400, str(error)) from None
    except Unavailable:
        return json_answer({"error": "pool"}, 500)
    except StatementFailed as error:
        return _failure(call_id, TransactionRefused(error.message, "db_error"), 200)
    except TransactionRefused as error:
        return _failure(call_id, error, 200)
    request.engine.counters.transacted(request.tenant, {push.queue.decode() for push in bundle.pushes})
    results: list[dict[str, Any]] = []
    for index, (kind, position) in enumerate(bundle.order):
        result: dict[str, Any] = {"index": index, "type": kind, "success": True}
        if kind == "push":
            pushed = done.pushed[position]
            result["transactionId"] = pushed.transaction_id.decode()
            result["messageId"] = pushed.message_id
            result["queueName"] = bundle.pushes[position].queue.decode()
            if pushed.duplicate:
                result["duplicate"] = True
        else:
            acked = done.acked[position]
            result.update(transactionId=bundle.acks[position].transaction_id, error=acked.error, dlq=acked.dlq)
        results.append(result)
    return json_answer({"transactionId": call_id, "success": True, "results": results})


def read(body: bytes) -> Bundle:
    """The operations of a body. Raises a 400 `Refusal`, or `TransactionRefused` for a wrong shape."""
    decoded, masks = _body.decode(body)
    text = bytes(decoded.operations)
    if not text.startswith(b"["):
        raise TransactionRefused(NO_OPERATIONS, "bad_request")
    operations, _ = _operations.decode(text)
    bundle = Bundle()
    leases = decoded.requiredLeases
    if isinstance(leases, list):
        bundle.leases = [lease.replace("\x00", "\ufffd") for lease in leases if isinstance(lease, str) and lease]
    for operation in operations:
        if operation.type == "ack":
            bundle.add_ack(operation, masks)
        elif operation.type == "push":
            items = bytes(operation.items)
            for item in _operations.decode(items)[0] if items.startswith(b"[") else [operation]:
                bundle.add_push(item, masks)
        else:
            kind = operation.type if isinstance(operation.type, str) else "no type"
            raise TransactionRefused(f"{ONLY_PUSH_AND_ACK}{kind[:80]}", "bad_request")
    return bundle


def _failure(call_id: str, error: TransactionRefused, status: int) -> Answer:
    return json_answer(
        {
            "transactionId": call_id,
            "success": False,
            "error": error.error,
            "results": [],
            "reason": error.reason,
        },
        status,
    )
