"""Computing the statistics of queues now, instead of at their next turn."""

from __future__ import annotations

from flask import Blueprint

from queen.api.answers import Answer
from queen.api.database_errors import database_errors
from queen.api.http import Request, direct
from queen.db import statistics

blueprint = Blueprint("statistics", __name__)


@blueprint.post("/api/v1/stats/refresh")
@direct
@database_errors("refresh failed: ")
def refresh(request: Request) -> Answer:
    """Computes them and says what changed. Needs no body."""
    return Answer(200, statistics.refresh_now(request.engine.database).encode())
