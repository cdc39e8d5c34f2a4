"""The mesh as operators see it, and a wake by hand."""

from __future__ import annotations

from flask import Blueprint

from queen.api.answers import Answer, Refusal, json_answer
from queen.api.http import Request, direct

blueprint = Blueprint("mesh", __name__)


@blueprint.get("/internal/api/shared-state/stats")
@blueprint.get("/internal/api/inter-instance/stats")
@direct
def statistics(request: Request) -> Answer:
    """Peers, liveness and counters of this broker's mesh, whichever of its workers answers."""
    flags = request.engine.flags
    body = request.engine.hints.outlet.statistics()
    body.update(maintenance_mode=flags.push_maintenance, pop_maintenance_mode=flags.pop_maintenance)
    return json_answer(body)


@blueprint.post("/internal/api/notify")
@direct
def notify(request: Request) -> Answer:
    """Wakes the pops of a queue on every broker, as a push would."""
    body = request.json()
    queue = body.get("queue") if isinstance(body, dict) else None
    if not isinstance(queue, str) or not queue:
        raise Refusal(400, "queue is required")
    partition = body.get("partition")
    try:
        name, lane = queue.encode(), partition.encode() if isinstance(partition, str) else b""
    except UnicodeEncodeError:
        raise Refusal(400, "queue and partition must not contain lone surrogates") from None
    request.engine.hints.notify(request.tenant, name, lane)
    return json_answer({"status": "ok"})
