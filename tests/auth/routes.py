"""Every route of the broker's application, as requests that a test can send."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, cast

from queen.api.http import Host
from queen.app import create_app

NOBODY = "00000000-0000-4000-8000-000000000000"


@dataclass(frozen=True)
class Route:
    """A method and the pattern of its path."""

    method: str
    rule: str

    def path(self, **values: str) -> str:
        """Return a path of the route; parameters that are not given are a UUID of nothing."""
        return re.sub(r"<(?:\w+:)?(\w+)>", lambda match: values.get(match[1], NOBODY), self.rule)


def every_route() -> list[Route]:
    """Return all of them; HEAD goes with GET."""
    host: Any = object()
    app = create_app(cast(Host, host))
    found = {
        Route(method, rule.rule)
        for rule in app.url_map.iter_rules()
        for method in rule.methods or ()
        if method not in ("HEAD", "OPTIONS")
    }
    return sorted(found, key=lambda route: (route.rule, route.method))
