"""Dead letters: listing, bulk removal, and removal of one message's."""

from __future__ import annotations

from uuid import UUID

from flask import Blueprint

from queen.api.answers import Answer, json_answer
from queen.api.database_errors import database_errors
from queen.api.http import Request, direct, lenient_integer
from queen.db import administration
from queen.db.administration import DeadLetter, DeadLetterFilter
from queen.engine.encryption import Encryption

blueprint = Blueprint("dead_letters", __name__)

_PAGE = 100


@blueprint.get("/api/v1/dlq")
@direct
@database_errors("dlq failed: ")
def list_dead_letters(request: Request) -> Answer:
    """A page of dead letters, the last filed first. ``total`` is the length of the page."""
    parameters = request.parameters()
    limit = lenient_integer(parameters, "limit", _PAGE)
    offset = lenient_integer(parameters, "offset", 0)
    letters = administration.list_dead_letters(
        request.engine.database, request.tenant, _filter(parameters), limit, offset
    )
    return Answer(
        200,
        b'{"messages":[%s],"pagination":{"limit":%d,"offset":%d},"total":%d}'
        % (b",".join([_message(letter, request.engine.encryption) for letter in letters]), limit, offset, len(letters)),
    )


@blueprint.delete("/api/v1/dlq")
@direct
@database_errors("bulk dlq purge failed: ")
def purge(request: Request) -> Answer:
    """Deletes the dead letters of a queue that match the filters of the listing."""
    chosen = _filter(request.parameters())
    if chosen.queue is None:
        # A forgotten filter must not empty a tenant.
        return json_answer(
            {
                "success": False,
                "error": "queue is required",
                "message": "Bulk DLQ purge requires an exact queue name",
            },
            400,
        )
    deleted = administration.purge_dead_letters(request.engine.database, request.tenant, chosen)
    return json_answer({"success": True, "deleted": deleted, "queue": chosen.queue, "consumerGroup": chosen.group})


@blueprint.delete("/api/v1/messages/<partition_id>/<transaction_id>")
@direct
@database_errors("delete failed: ")
def delete(request: Request, partition_id: str, transaction_id: str) -> Answer:
    """Deletes the dead letters of one message, those of every group."""
    address = {"partitionId": partition_id, "transactionId": transaction_id}
    partition = _uuid(partition_id)
    if partition is None or not administration.delete_dead_letter(
        request.engine.database, request.tenant, partition, transaction_id
    ):
        return json_answer(
            {
                "success": False,
                **address,
                "error": "Message not found",
                "message": "No dead-letter row for this address. "
                "Live messages live in immutable segments and cannot be deleted",
            },
            404,
        )
    return json_answer({"success": True, **address, "message": "Message deleted successfully"})


def _filter(parameters: dict[str, str]) -> DeadLetterFilter:
    return DeadLetterFilter(
        queue=parameters.get("queue") or None,
        group=parameters.get("consumerGroup") or None,
        partition=parameters.get("partition") or None,
        failed_from=parameters.get("from") or None,
        failed_to=parameters.get("to") or None,
    )


def _message(letter: DeadLetter, encryption: Encryption) -> bytes:
    """A dead letter as JSON: the payload joins as it was sent, since decoding would change it."""
    payload = b"null" if letter.payload is None else encryption.open(letter.payload.encode())
    return b'%b,"data":%b}' % (letter.fields[:-1].encode(), payload)


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
