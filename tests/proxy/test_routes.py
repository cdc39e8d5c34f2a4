"""The class of every route, and that the rest is closed."""

from __future__ import annotations

import pytest

from queen.proxy.routes import Class, Route, classify


@pytest.mark.parametrize(
    ("request_line", "route"),
    [
        ("POST /api/v1/push", Route(Class.PRODUCE)),
        ("POST /api/v1/transaction", Route(Class.PRODUCE)),
        ("GET /api/v1/pop/queue/a/partition/b", Route(Class.CONSUME)),
        ("POST /api/v1/lease/x/extend", Route(Class.CONSUME)),
        ("GET /api/v1/pop", Route(Class.BLOCKED)),
        ("POST /api/v1/configure", Route(Class.QUEUE_ADMIN)),
        ("DELETE /api/v1/resources/queues/q", Route(Class.QUEUE_ADMIN)),
        ("GET /api/v1/resources/queues/q", Route(Class.READ)),
        ("POST /api/v1/resources/queues/q", Route(Class.BLOCKED)),
        ("POST /api/v1/messages/p/t/retry", Route(Class.QUEUE_ADMIN)),
        ("POST /api/v1/messages/p/t/other", Route(Class.BLOCKED)),
        ("PUT /api/v1/messages/p/t", Route(Class.BLOCKED)),
        ("HEAD /api/v1/messages/p/t", Route(Class.READ)),
        ("POST /api/v1/consumer-groups/g/queues/q/seek", Route(Class.QUEUE_ADMIN)),
        ("GET /api/v1/status", Route(Class.OPERATOR)),
        ("GET /api/v1/status/queues", Route(Class.READ)),
        ("GET /api/v1/system/anything", Route(Class.BLOCKED)),
        ("POST /streams/v1/cycle", Route(Class.GATED, "streams", "mixed")),
        ("PUT /api/v1/kv/a", Route(Class.GATED, "kv", "grow")),
        ("PATCH /api/v1/kv/a", Route(Class.BLOCKED)),
        ("GET /api/v1/ephemeral/queues/q/depth", Route(Class.GATED, "ephemeral", "read")),
        ("GET /api/v1/ephemeral/other", Route(Class.BLOCKED)),
        ("POST /api/v1/traces", Route(Class.GATED, "traces", "open")),
        ("GET /api/v1/resources/../system/maintenance", Route(Class.BLOCKED)),
        ("GET /api/v2/anything", Route(Class.BLOCKED)),
        ("GET /health", Route(Class.READ)),
    ],
)
def test_class(request_line: str, route: Route) -> None:
    assert classify(*request_line.split(" ")) == route
