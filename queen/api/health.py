"""Readiness and liveness."""

from __future__ import annotations

import psycopg
from flask import Blueprint

from queen import __version__
from queen.api.answers import Answer, json_answer
from queen.api.http import Request, direct
from queen.db import administration
from queen.db.errors import Unavailable

blueprint = Blueprint("health", __name__)

ENGINE = "segments-python"


@blueprint.get("/health")
@direct
def health(request: Request) -> Answer:
    """Readiness: whether a pooled connection makes a round trip. 200, or 503 also when the broker is leaving."""
    if request.engine.stopping:
        return _health("stopping", "unchecked", 503)
    try:
        administration.ping(request.engine.database)
    except (Unavailable, psycopg.Error):
        return _health("unhealthy", "disconnected", 503)
    return _health("healthy", "connected", 200)


@blueprint.get("/status")
@direct
def status(request: Request) -> Answer:
    """Liveness: asks nothing of the database, without which the broker still takes pushes."""
    return json_answer({"status": "ok", "engine": ENGINE})


def _health(word: str, database: str, code: int) -> Answer:
    return json_answer({"status": word, "database": database, "engine": ENGINE, "version": __version__}, code)
