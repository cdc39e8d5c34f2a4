"""/api/console/*: what the console shows and does, as JSON for people's own programs.

For sessions of people only, on the cluster that the host names.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from flask import Blueprint, Response, request

from queen import codec
from queen.codec import JsonError
from queen.proxy.clusters import FEATURES, LIMITS, Cluster
from queen.proxy.console.records import Records, invalid
from queen.proxy.console.visitors import Visitors
from queen.proxy.console.web import check_origin
from queen.proxy.pxdb import Row
from queen.proxy.refusals import Refusal

PushBlock = Callable[[Cluster], str | None]

_MOST_HOURS = 168
_MOST_BODY = 65_536


class ConsoleApi:
    """The views below /api/console."""

    def __init__(self, records: Records, visitors: Visitors, push_block: PushBlock) -> None:
        """``push_block`` tells which quota blocks a cluster's pushes: ``storage``, ``monthly_quota`` or None."""
        self._records = records
        self._visitors = visitors
        self._push_block = push_block

    def blueprint(self) -> Blueprint:
        """The routes."""
        routes: list[tuple[str, str, Callable[..., Response]]] = [
            ("GET", "/overview", self.overview),
            ("GET", "/usage", self.usage),
            ("GET", "/keys", self.keys),
            ("POST", "/keys", self.make_key),
            ("DELETE", "/keys/<key_id>", self.revoke_key),
            ("GET", "/members", self.members),
            ("POST", "/members", self.grant),
            ("DELETE", "/members", self.remove),
        ]
        blueprint = Blueprint("console_api", __name__, url_prefix="/api/console")
        for method, rule, view in routes:
            blueprint.add_url_rule(rule, view.__name__, view, methods=[method])
        return blueprint

    def overview(self) -> Response:
        seat = self._visitors.of_api()
        return _json(
            {"slug": seat.cluster.slug, "role": seat.role} | summary(self._records, self._push_block, seat.cluster)
        )

    def usage(self) -> Response:
        seat = self._visitors.of_api()
        return _json([_times(row) for row in self._records.usage(seat.cluster, _hours(request.args.get("hours")))])

    def keys(self) -> Response:
        seat = self._visitors.of_api()
        seat.require_admin()
        shown = ("id", "name", "scopes", "created_at", "last_used_at", "revoked_at")
        return _json([_times({name: row[name] for name in shown}) for row in self._records.keys(seat.cluster)])

    def make_key(self) -> Response:
        body = _body()
        seat = self._visitors.of_api()
        seat.require_admin()
        key_id, key = self._records.make_key(seat.cluster, seat.visitor.id, body.get("name"), body.get("scopes"))
        return _json({"id": key_id, "key": key})

    def revoke_key(self, key_id: str) -> Response:
        _json_only()
        seat = self._visitors.of_api()
        seat.require_admin()
        self._records.revoke_key(seat.cluster, seat.visitor.id, key_id)
        return _json({"ok": True})

    def members(self) -> Response:
        seat = self._visitors.of_api()
        seat.require_admin()
        shown = ("user_id", "email", "role", "granted_at")
        return _json([_times({name: row[name] for name in shown}) for row in self._records.members(seat.cluster)])

    def grant(self) -> Response:
        body = _body()
        seat = self._visitors.of_api()
        seat.require_admin()
        member = self._records.grant(seat.cluster, seat.visitor.id, body.get("email"), body.get("role"))
        self._visitors.sessions.forget_role(str(member["user_id"]), seat.cluster)
        return _json({"ok": True, "email": member["email"], "role": member["role"]})

    def remove(self) -> Response:
        body = _body()
        seat = self._visitors.of_api()
        seat.require_admin()
        member = self._records.remove(seat.cluster, seat.visitor.id, body.get("email"))
        self._visitors.sessions.forget_role(str(member["user_id"]), seat.cluster)
        return _json({"ok": True})


def summary(records: Records, push_block: PushBlock, cluster: Cluster) -> dict[str, Any]:
    """A cluster's state, plan, use of it and limits, where None is no limit."""
    blocked = push_block(cluster)
    limits = {name: getattr(cluster.limits, name) for name in LIMITS}
    return {
        "status": cluster.status,
        "plan": {"code": cluster.plan, "monthly_msgs_quota": limits.pop("monthly_msgs_quota")},
        "usage": {"month": datetime.now(UTC).strftime("%Y-%m"), "msgs": records.month_messages(cluster)},
        "push_block": blocked,
        "storage": {"max_retained_bytes": cluster.limits.max_retained_bytes, "over_quota": blocked == "storage"},
        "limits": limits,
        "features": {name: name in cluster.features for name in sorted(FEATURES)},
    }


def _hours(text: str | None) -> int:
    hours = int(text) if text and text.isascii() and text.isdecimal() and len(text) < 9 else 24
    return max(1, min(hours, _MOST_HOURS))


def _json_only() -> None:
    """Raises `Refusal` for what a form of another site could send: a change needs the JSON content type."""
    check_origin()
    if request.mimetype != "application/json":
        raise invalid("the content type must be application/json")


def _body() -> dict[str, Any]:
    _json_only()
    if (request.content_length or 0) > _MOST_BODY:
        raise Refusal(413, "payload_too_large", "request body exceeds cap")
    try:
        body = codec.loads(request.get_data(cache=False))
    except JsonError as error:
        raise invalid(f"bad JSON: {error}") from None
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object")
    return body


def _times(row: Row) -> Row:
    """A row with its times and ids as JSON has them."""
    shown = {}
    for name, value in row.items():
        if isinstance(value, datetime):
            value = value.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        elif value is not None and not isinstance(value, int | str | list):
            value = str(value)
        shown[name] = value
    return shown


def _json(value: object) -> Response:
    return Response(codec.dumps(value), content_type="application/json")
