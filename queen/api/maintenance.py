"""The maintenance flags: what they are, and setting them for all brokers."""

from __future__ import annotations

from flask import Blueprint

from queen.api.answers import Answer, Refusal, json_answer
from queen.api.http import Request, direct
from queen.db.errors import StatementFailed, Unavailable
from queen.engine.flags import Flag
from queen.log import Log

blueprint = Blueprint("maintenance", __name__)

log = Log("maintenance")


@blueprint.get("/api/v1/system/maintenance")
@direct
def maintenance(request: Request) -> Answer:
    """Both flags and the state of the spool. From memory while the database is away: never a 5xx."""
    _refresh(request)
    flags = request.engine.flags
    spool = request.spool.statistics()
    return json_answer(
        {
            "maintenanceMode": flags.push_maintenance,
            "popMaintenanceMode": flags.pop_maintenance,
            "bufferedMessages": spool.pending,
            "bufferHealthy": spool.healthy,
            "bufferStats": {
                "pendingCount": spool.pending,
                "failedCount": spool.failed,
                "dbHealthy": spool.healthy,
                "failedFiles": {
                    "count": spool.files,
                    "totalBytes": spool.bytes,
                    "totalMB": spool.bytes / 1_048_576,
                    "failoverCount": spool.files,
                    "qos0Count": 0,
                },
                "oldestAgeSeconds": round(spool.oldest_seconds, 3),
                "quarantinedFiles": spool.quarantined_files,
                "quarantinedEvents": spool.quarantined_events,
                "writable": spool.writable,
            },
        }
    )


@blueprint.post("/api/v1/system/maintenance")
@direct
def set_maintenance(request: Request) -> Answer:
    """Diverts pushes to the spool, or ends that."""
    enabled = _flip(request, Flag.PUSH_MAINTENANCE)
    message = (
        "Maintenance mode ENABLED. All PUSHes routing to file buffer."
        if enabled
        else "Maintenance mode DISABLED. Background processor will drain buffer to DB."
    )
    spool = request.spool.statistics()
    return json_answer(
        {
            "maintenanceMode": enabled,
            "bufferedMessages": spool.pending,
            "bufferHealthy": spool.healthy,
            "message": message,
        }
    )


@blueprint.get("/api/v1/system/maintenance/pop")
@direct
def pop_maintenance(request: Request) -> Answer:
    """Whether pops are held back."""
    _refresh(request)
    enabled = request.engine.flags.pop_maintenance
    message = (
        "Pop maintenance mode is ON. All POP operations return empty arrays."
        if enabled
        else "Pop maintenance mode is OFF. Normal operation."
    )
    return json_answer({"popMaintenanceMode": enabled, "message": message})


@blueprint.post("/api/v1/system/maintenance/pop")
@direct
def set_pop_maintenance(request: Request) -> Answer:
    """Holds back pops, or ends that."""
    enabled = _flip(request, Flag.POP_MAINTENANCE)
    message = (
        "Pop maintenance mode ENABLED. All POP operations will return empty arrays."
        if enabled
        else "Pop maintenance mode DISABLED. Normal operation resumed."
    )
    return json_answer({"popMaintenanceMode": enabled, "message": message})


@blueprint.get("/api/v1/status/buffers")
@direct
def buffers(request: Request) -> Answer:
    """What waits in the spool, and whether the database answers right now. Never a 5xx."""
    spool = request.spool.statistics()
    healthy = spool.healthy and request.engine.database.probe()
    return json_answer({"pending": spool.pending, "failed": spool.failed, "dbHealthy": healthy, "worker": 0})


@blueprint.get("/api/v1/system/shared-state")
@direct
def shared_state(request: Request) -> Answer:
    """The flags in an older shape, whose first two keys are constants."""
    flags = request.engine.flags
    return json_answer(
        {
            "enabled": False,
            "reason": "single_node_segments_broker",
            "maintenance_mode": flags.push_maintenance,
            "pop_maintenance_mode": flags.pop_maintenance,
        }
    )


def _refresh(request: Request) -> None:
    """Takes the flags from the database; without it, memory has to do."""
    try:
        request.engine.flags.read()
    except (Unavailable, StatementFailed) as error:
        log.sampled(10, "flags can't be read; answering from memory", error=error)


def _flip(request: Request, flag: Flag) -> bool:
    """Sets a flag as the body says. Raises a `Refusal`: 400 for the body, 503 when nothing was changed."""
    enabled = _enabled(request.json())
    try:
        request.engine.flags.set(flag, enabled)
    except (Unavailable, StatementFailed) as error:
        log.warning("flag not set", flag=flag, to=enabled, error=error)
        if getattr(error, "lost", False):
            outcome = "the connection broke while it was being stored: read it to see what holds"
        else:
            outcome = "the database could not store it: nothing was changed, try again when it is back"
        raise Refusal(503, f"{flag} was not set: {outcome} ({error})") from None
    request.engine.hints.tell_flag(flag, enabled)
    request.engine.hints.tell_flag(flag, enabled)
    log.info("flag set", flag=flag, to=enabled)
    return enabled


def _enabled(body: object) -> bool:
    if not isinstance(body, dict):
        raise Refusal(400, "bad body: expected an object")
    enabled = body.get("enabled")
    if enabled is None:
        raise Refusal(400, "enabled (boolean) is required")
    if not isinstance(enabled, bool):
        raise Refusal(400, f"bad body: enabled must be true or false, got {str(enabled)[:80]!r}")
    return enabled
