"""/console: the pages of a cluster, for its members and for operators who act as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlencode

from flask import Blueprint, Response, make_response, redirect, render_template, request

from queen import codec
from queen.proxy.clusters import Cluster, worst
from queen.proxy.console import passwords
from queen.proxy.console.api import PushBlock, summary
from queen.proxy.console.charts import chart
from queen.proxy.console.passwords import Passwords
from queen.proxy.console.records import INVITATION_HOURS, Records
from queen.proxy.console.visitors import Seat, Visitor, Visitors
from queen.proxy.console.web import check_form, is_https, safe_next
from queen.proxy.gateway import Gateway
from queen.proxy.principals import ROLES, SCOPES
from queen.proxy.pxdb import Row, Unavailable
from queen.proxy.refusals import Refusal, bad_gateway, cluster_suspended, route_blocked

Page = str | Response | tuple[str, int]

# Hours shown, and the minutes of one step of the chart.
RANGES = {1: 1, 6: 5, 24: 30, 168: 180}

_ROLES = ("admin", "producer", "consumer", "viewer")
_SCOPES = ("produce", "consume", "read", "admin")
_DEAD_LETTERS = 20

assert set(_ROLES) == ROLES and set(_SCOPES) == SCOPES


class Pages:
    """The views below /console that are about one cluster or one's own account."""

    def __init__(
        self, records: Records, visitors: Visitors, words: Passwords, gateway: Gateway, push_block: PushBlock
    ) -> None:
        self._records = records
        self._visitors = visitors
        self._passwords = words
        self._gateway = gateway
        self._push_block = push_block

    def blueprint(self) -> Blueprint:
        """The routes."""
        blueprint = Blueprint("pages", __name__, template_folder="templates")
        routes: list[tuple[str, str, Callable[..., Page]]] = [
            ("GET", "/", self.home),
            ("GET", "/<path:path>", self.nowhere),
            ("GET", "/console", self.console),
            ("GET", "/console/", self.console),
            ("GET", "/console/account", self.account),
            ("POST", "/console/account", self.change_password),
            ("GET", "/console/c/<slug>", self.overview),
            ("GET", "/console/c/<slug>/usage", self.usage),
            ("GET", "/console/c/<slug>/queues", self.queues),
            ("GET", "/console/c/<slug>/queue", self.queue),
            ("GET", "/console/c/<slug>/keys", self.keys),
            ("POST", "/console/c/<slug>/keys", self.make_key),
            ("POST", "/console/c/<slug>/keys/revoke", self.revoke_key),
            ("GET", "/console/c/<slug>/members", self.members),
            ("POST", "/console/c/<slug>/members", self.invite),
            ("POST", "/console/c/<slug>/members/role", self.change_role),
            ("POST", "/console/c/<slug>/members/remove", self.remove_member),
        ]
        for method, rule, view in routes:
            blueprint.add_url_rule(rule, f"{view.__name__}_{rule.endswith('/')}", view, methods=[method])
        return blueprint

    def home(self) -> Page:
        """Every cluster the visitor can open."""
        visitor = self._visitors.of_page()
        clusters = [
            {**row, "status": worst(row["tenant_status"], row["status"])} for row in self._visitors.clusters(visitor)
        ]
        return render_template("home.html", visitor=visitor, clusters=clusters)

    def console(self) -> Page:
        """On to the cluster of the host, or to the only one there is; else to the choice."""
        visitor = self._visitors.of_page()
        clusters = self._visitors.clusters(visitor)
        here = self._visitors.here()
        wanted = next((row for row in clusters if here and str(row["id"]) == here.id), None)
        if wanted is None and len(clusters) == 1:
            wanted = clusters[0]
        return _go(f"/console/c/{wanted['slug']}" if wanted else "/")

    def nowhere(self, path: str) -> Page:
        """Whether there is a page of that address is told to nobody without a session."""
        if path.startswith(("api/", "auth/", "console/static/")):
            raise route_blocked()
        self._visitors.of_page()
        raise Refusal(404, "not_found", f"There is no page at /{path[:200]}.")

    def overview(self, slug: str) -> Page:
        seat = self._seat(slug)
        facts = summary(self._records, self._push_block, seat.cluster)
        return self._page(seat, "overview", facts=facts, chart=self._chart(seat.cluster, 24), hours=24)

    def usage(self, slug: str) -> Page:
        seat = self._seat(slug)
        asked = request.args.get("hours", "24")
        hours = next((hours for hours in RANGES if str(hours) == asked), 24)
        totals: dict[str, dict[str, int]] = {}
        for row in self._records.usage(seat.cluster, hours):
            total = totals.setdefault(row["op"], dict.fromkeys(("reqs", "msgs", "bytes_in", "bytes_out"), 0))
            for name in total:
                total[name] += row[name]
        return self._page(
            seat, "usage", chart=self._chart(seat.cluster, hours), hours=hours, ranges=RANGES, totals=totals
        )

    def queues(self, slug: str) -> Page:
        """The queues as the broker lists them for this cluster."""
        seat = self._seat(slug)
        search = request.args.get("search", "").strip()
        found = self._ask(seat.cluster, "/api/v1/resources/queues").get("queues", [])
        shown = [queue for queue in found if search.lower() in str(queue["name"]).lower()]
        shown.sort(key=lambda queue: str(queue["name"]))
        return self._page(seat, "queues", queues=shown, all=len(found), search=search)

    def queue(self, slug: str) -> Page:
        """One queue: its partitions, the groups that read it, its latest dead letters."""
        seat = self._seat(slug)
        name = request.args.get("name", "")
        path = f"/api/v1/resources/queues/{quote(name, safe='')}"
        queue = self._ask(seat.cluster, path, missing="There is no queue of that name.")
        groups = [
            group for group in self._ask(seat.cluster, "/api/v1/consumer-groups") if group.get("queueName") == name
        ]
        query = urlencode({"queue": name, "limit": _DEAD_LETTERS})
        dead = self._ask(seat.cluster, f"/api/v1/dlq?{query}").get("messages", [])
        return self._page(seat, "queue", active="queues", queue=queue, groups=groups, dead=dead)

    def keys(self, slug: str) -> Page:
        return self._keys(self._seat(slug, admin=True))

    def make_key(self, slug: str) -> Page:
        """The new key is on this answer and nowhere else, so it can't be a redirect."""
        seat = self._posted(slug)
        name, scopes = request.form.get("name", ""), request.form.getlist("scopes")
        try:
            _, key = self._records.make_key(seat.cluster, seat.visitor.id, name, scopes)
        except Refusal as error:
            return self._keys(seat, error=_sentence(error), name=name, chosen=scopes), error.status
        return self._keys(seat, made={"name": name.strip(), "key": key})

    def revoke_key(self, slug: str) -> Page:
        seat = self._posted(slug)
        try:
            self._records.revoke_key(seat.cluster, seat.visitor.id, request.form.get("key", ""))
        except Refusal as error:
            return self._keys(seat, error=_sentence(error)), error.status
        return _go(f"/console/c/{slug}/keys")

    def members(self, slug: str) -> Page:
        return self._members(self._seat(slug, admin=True))

    def invite(self, slug: str) -> Page:
        """Like a new key, the link for an invited person is shown once, on this answer."""
        seat = self._posted(slug)
        email, role = request.form.get("email", ""), request.form.get("role", "")
        try:
            member, token = self._records.invite(seat.cluster, seat.visitor.id, email, role)
        except Refusal as error:
            return self._members(seat, error=_sentence(error), email=email, role=role), error.status
        self._visitors.sessions.forget_role(str(member["user_id"]), seat.cluster)
        if token is None:
            return _go(f"/console/c/{slug}/members")
        scheme = "https" if is_https(request.environ) else "http"
        link = f"{scheme}://{request.headers.get('Host', '')}/auth/invite/{token}"
        return self._members(seat, invited={"email": member["email"], "link": link})

    def change_role(self, slug: str) -> Page:
        seat = self._posted(slug)
        return self._changed(
            seat,
            lambda: self._records.grant(
                seat.cluster, seat.visitor.id, request.form.get("email"), request.form.get("role")
            ),
        )

    def remove_member(self, slug: str) -> Page:
        seat = self._posted(slug)
        return self._changed(
            seat, lambda: self._records.remove(seat.cluster, seat.visitor.id, request.form.get("email"))
        )

    def account(self) -> Page:
        return render_template("account.html", visitor=self._visitors.of_page(), error=None, done=False)

    def change_password(self) -> Page:
        visitor = self._visitors.of_page()
        check_form(self._token())
        error = self._set_password(visitor)
        page = render_template("account.html", visitor=visitor, error=error, done=error is None)
        return (page, 400) if error else page

    def _set_password(self, visitor: Visitor) -> str | None:
        """Does what the form asks for, or returns what is wrong with it."""
        old, new = request.form.get("old", ""), request.form.get("password", "")
        if not self._passwords.verify(old, visitor.user["password_hash"]):
            return "That isn't your present password."
        fault = passwords.fault(new)
        if fault or new != request.form.get("again", ""):
            return fault or "The two new passwords differ."
        self._records.set_password(visitor.id, self._passwords.hash(new))
        tenant = str(visitor.user["tenant_id"])
        self._records.record(tenant, None, visitor.id, "password_changed", visitor.user["email"])
        return None

    def _changed(self, seat: Seat, change: Callable[[], Row]) -> Page:
        try:
            member = change()
        except Refusal as error:
            return self._members(seat, error=_sentence(error)), error.status
        self._visitors.sessions.forget_role(str(member["user_id"]), seat.cluster)
        # Whoever took their own role away has nothing more to see here.
        gone = str(member["user_id"]) == seat.visitor.id and not seat.visitor.operator
        return _go("/console" if gone else f"/console/c/{seat.cluster.slug}/members")

    def _keys(self, seat: Seat, **values: Any) -> str:
        return self._page(seat, "keys", keys=self._records.keys(seat.cluster), scopes=_SCOPES, **values)

    def _members(self, seat: Seat, **values: Any) -> str:
        members = self._records.members(seat.cluster)
        return self._page(seat, "members", members=members, roles=_ROLES, hours=INVITATION_HOURS, **values)

    def _seat(self, slug: str, admin: bool = False) -> Seat:
        seat = self._visitors.on_page(slug)
        if admin:
            seat.require_admin()
        if seat.cluster.closed:
            raise cluster_suspended()
        return seat

    def _posted(self, slug: str) -> Seat:
        """The seat of a form's sender, an admin."""
        seat = self._seat(slug, admin=True)
        check_form(self._token())
        return seat

    def _token(self) -> str:
        return self._visitors.sessions.token(request.environ, document=True) or ""

    def _chart(self, cluster: Cluster, hours: int) -> Any:
        return chart(self._records.usage_in_steps(cluster, hours, RANGES[hours]))

    def _page(self, seat: Seat, name: str, active: str = "", **values: Any) -> str:
        return render_template(
            f"{name}.html",
            seat=seat,
            visitor=seat.visitor,
            cluster=seat.cluster,
            active=active or name,
            **values,
        )

    def _ask(self, cluster: Cluster, target: str, missing: str = "") -> Any:
        """A broker's JSON, asked for this cluster alone; raises `Refusal` when there is none."""
        # Nothing of the browser's request but its address goes along.
        environ = {"REQUEST_METHOD": "GET", "REMOTE_ADDR": request.environ.get("REMOTE_ADDR", "")}
        status, _, body = self._gateway.fetch(environ, cluster, target)
        if status == 404 and missing:
            raise Refusal(404, "not_found", missing)
        if status != 200:
            raise bad_gateway(f"the broker answered {status}")
        return codec.loads(body)


def error_page(status: int, text: str) -> tuple[str, int]:
    """What went wrong, as a page."""
    return render_template("error.html", status=status, text=text), status


def away(_: Unavailable) -> tuple[str, int]:
    return error_page(502, "The proxy's database gives no answer. Your queues go on; try again in a moment.")


def sign_in_first() -> Response:
    """To the sign-in, and from there back to the page: the one that was asked for, if it was asked for by GET."""
    target = request.full_path.removesuffix("?") if request.method in ("GET", "HEAD") else "/console"
    query = urlencode({"next": safe_next(target)})
    return make_response(redirect(f"/auth/login?{query}", 302))


def _sentence(error: Refusal) -> str:
    text = error.text
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _go(target: str) -> Response:
    return make_response(redirect(target, 303))
