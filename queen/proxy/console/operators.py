"""/console/operator: the cell as its operators see it. To read; what changes it are the functions in SQL."""

from __future__ import annotations

from collections.abc import Callable

from flask import Blueprint, render_template

from queen.proxy.clusters import LIMITS
from queen.proxy.console.records import Records
from queen.proxy.console.visitors import Visitor, Visitors
from queen.proxy.refusals import route_blocked


class Operators:
    """Views for live operators; for everybody else they aren't there."""

    def __init__(self, records: Records, visitors: Visitors) -> None:
        self._records = records
        self._visitors = visitors

    def blueprint(self) -> Blueprint:
        """The routes."""
        routes: list[tuple[str, Callable[[], str]]] = [
            ("/tenants", self.tenants),
            ("/cells", self.cells),
            ("/plans", self.plans),
        ]
        blueprint = Blueprint("operators", __name__, url_prefix="/console/operator")
        for rule, view in routes:
            blueprint.add_url_rule(rule, view.__name__, view, methods=["GET"])
        return blueprint

    def tenants(self) -> str:
        visitor = self._operator()
        tenants = self._records.tenants()
        return render_template("tenants.html", visitor=visitor, active="tenants", tenants=tenants)

    def cells(self) -> str:
        visitor = self._operator()
        return render_template("cells.html", visitor=visitor, active="cells", cells=self._records.cells())

    def plans(self) -> str:
        visitor = self._operator()
        plans = self._records.plans()
        return render_template("plans.html", visitor=visitor, active="plans", plans=plans, limits=LIMITS)

    def _operator(self) -> Visitor:
        visitor = self._visitors.of_page()
        if not visitor.operator:
            raise route_blocked()
        return visitor
