"""POST /api/v1/lease/:leaseId/extend."""

from __future__ import annotations

import msgspec
from flask import Blueprint

from queen.api.answers import Answer, Refusal, json_answer
from queen.api.http import Request, direct
from queen.db.binary import timestamp_text
from queen.db.errors import StatementFailed, Unavailable

blueprint = Blueprint("lease", __name__)

_DEFAULT_SECONDS = 60
_MOST_SECONDS = 2**31 - 1


@blueprint.post("/api/v1/lease/<lease_id>/extend")
@direct
def extend(request: Request, lease_id: str) -> Answer:
    seconds = _seconds(request.body())
    renewed, at = 0, None
    if "\x00" not in lease_id:
        try:
            renewed, at = request.engine.leases.extend(request.tenant, lease_id.encode(), seconds)
        except Unavailable:
            raise Refusal(500, "pool") from None
        except StatementFailed as error:
            raise Refusal(500, f"renew failed: {error.message}") from None
    expires = None if at is None else timestamp_text(at)
    return json_answer(
        {
            "leaseId": lease_id,
            "success": renewed > 0,
            "renewed": renewed,
            "newExpiresAt": expires,
            "expiresAt": expires,
            "lease_expires_at": expires,
        }
    )


def _seconds(body: bytes) -> int:
    """The seconds asked for. Whatever can't be read means the default: this route never answers 400."""
    try:
        value = msgspec.json.decode(body)["seconds"]
    except (msgspec.DecodeError, RecursionError, TypeError, KeyError, IndexError):
        return _DEFAULT_SECONDS
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > _MOST_SECONDS:
        return _DEFAULT_SECONDS
    return max(value, 1)
