"""The HTTP surface: one module per resource, each view a function from a request to an answer."""

from __future__ import annotations

from flask import Blueprint


def blueprints() -> list[Blueprint]:
    """Every blueprint of the broker."""
    from queen.api import (
        ack,
        consumer_groups,
        dead_letters,
        health,
        lease,
        maintenance,
        mesh,
        metrics,
        pop,
        push,
        queues,
        statistics,
        transaction,
    )

    modules = (
        push,
        pop,
        ack,
        lease,
        transaction,
        queues,
        consumer_groups,
        dead_letters,
        maintenance,
        mesh,
        metrics,
        statistics,
        health,
    )
    return [module.blueprint for module in modules]
