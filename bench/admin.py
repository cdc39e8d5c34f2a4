"""The few calls around a run that need no speed: health, and the removal of what it created."""

from __future__ import annotations

import http.client
import time
from urllib.parse import quote

from bench.measure import say
from bench.workload import Target


def call(target: Target, method: str, path: str) -> tuple[int, bytes]:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection(target.host, target.port, timeout=120)
    try:
        connection.request(method, path, headers=target.headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def delete_queue(target: Target, queue: str) -> None:
    """Delete a queue of ours."""
    _delete(target, f"/api/v1/resources/queues/{quote(queue, safe='')}")


def delete_group(target: Target, group: str) -> None:
    """Delete a consumer group of ours."""
    _delete(target, f"/api/v1/consumer-groups/{quote(group, safe='')}")


def _delete(target: Target, path: str) -> None:
    """A failed removal leaves rubbish behind but doesn't spoil figures: say so and go on."""
    try:
        status, body = call(target, "DELETE", path)
    except OSError as error:
        say(f"DELETE {path}: {error}")
        return
    if status != 200:
        say(f"DELETE {path}: {status} {body[:200].decode('utf-8', 'replace')}")


def wait_until_healthy(target: Target, seconds: float, path: str = "/health") -> str | None:
    """Wait until a server answers its health check with 200; the last failure, or None."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            status, body = call(target, "GET", path)
            if status == 200:
                return None
            failure = f"{status} {body[:200].decode('utf-8', 'replace')}"
        except OSError as error:
            failure = str(error)
        if time.monotonic() >= deadline:
            return failure
        time.sleep(0.1)
