"""The HTTP surface: one module per resource, each view a function from a request to an answer."""

from __future__ import annotations

from flask import Blueprint


def blueprints() -> list[Blueprint]:
    """Every blueprint of the broker. Made anew for each application, as two may live in one process."""
    from queen.api import consumer_groups, dead_letters, health, queues

    return [health.blueprint, queues.blueprint, consumer_groups.blueprint, dead_letters.blueprint]
