"""Queues: configuration, removal, listing, detail and depth."""

from __future__ import annotations

from typing import Any

from flask import Blueprint

from queen import codec
from queen.api.answers import Answer, Refusal, json_answer
from queen.api.database_errors import database_errors
from queen.api.http import Request, direct, lenient_integer
from queen.db import administration

blueprint = Blueprint("queues", __name__)

_ALL = 2**31 - 1


@blueprint.post("/api/v1/configure")
@direct
@database_errors("configure failed: ")
def configure(request: Request) -> Answer:
    """Creates or reconfigures a queue: options not sent go back to their defaults, unless merged."""
    body = request.json()
    queue = body.get("queue") if isinstance(body, dict) else None
    if not isinstance(queue, str):
        raise Refusal(400, "queue is required")
    merge = _merges(body)
    encryption = request.engine.encryption
    answer = administration.configure_queue(
        request.engine.database,
        request.tenant,
        queue,
        _options(body),
        merge,
        encryption.enabled or not encryption.required,
    )
    request.engine.queue_changed(request.tenant, queue)
    return Answer(200, answer.encode())


@blueprint.delete("/api/v1/resources/queues/<queue>")
@direct
@database_errors("delete failed: ")
def delete(request: Request, queue: str) -> Answer:
    """Deletes a queue with everything in it. One that doesn't exist is no error: clients tidy up so."""
    existed = administration.delete_queue(request.engine.database, request.tenant, queue)
    request.engine.queue_changed(request.tenant, queue, deleted=True)
    answer: dict[str, Any] = {"deleted": existed, "queue": queue, "existed": existed}
    if not existed:
        answer["message"] = "Queue not found, nothing was deleted"
    return json_answer(answer)


@blueprint.get("/api/v1/resources/queues")
@direct
@database_errors("list failed: ")
def list_queues(request: Request) -> Answer:
    """Every queue of the tenant, newest first, or those that the query asks for."""
    parameters = request.parameters()
    answer = administration.list_queues(
        request.engine.database,
        request.tenant,
        parameters.get("namespace") or None,
        parameters.get("task") or None,
        parameters.get("search") or None,
        lenient_integer(parameters, "limit", _ALL),
        lenient_integer(parameters, "offset", 0),
    )
    return Answer(200, answer.encode())


@blueprint.get("/api/v1/resources/queues/<queue>")
@direct
@database_errors("get failed: ")
def detail(request: Request, queue: str) -> Answer:
    """One queue with its partitions, computed for this request."""
    return _found(administration.queue_detail(request.engine.database, request.tenant, queue))


@blueprint.get("/api/v1/resources/queues/<queue>/depth")
@direct
@database_errors("depth failed: ")
def depth(request: Request, queue: str) -> Answer:
    """How much is pending, for one group or for all."""
    group = request.parameters().get("group") or None
    return _found(administration.queue_depth(request.engine.database, request.tenant, queue, group))


def _found(answer: str | None) -> Answer:
    if answer is None:
        raise Refusal(404, "Queue not found")
    return Answer(200, answer.encode())


def _merges(body: dict[str, Any]) -> bool:
    """Whether options not sent keep their values. Raises a 400 `Refusal` for an unknown mode."""
    mode = body.get("mode")
    if mode not in (None, "merge", "replace"):
        raise Refusal(400, f'mode must be "merge" or "replace", got {codec.dumps(mode).decode()[:100]}')
    return bool(mode == "merge")


def _options(body: dict[str, Any]) -> dict[str, Any]:
    """The options of a configure body: its object ``options``, or else its other keys."""
    options = body.get("options")
    if isinstance(options, dict):
        chosen = dict(options)
    else:
        chosen = {key: value for key, value in body.items() if key not in ("queue", "options", "mode")}
    for label in ("namespace", "task"):
        value = body.get(label)
        if isinstance(value, str) and value:
            chosen.setdefault(label, value)
    return chosen
