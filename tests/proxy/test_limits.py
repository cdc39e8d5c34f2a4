"""What a plan allows: size caps in both modes, blocks, quotas, revocation and states that take effect at once."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.broker import wait_until
from tests.proxy.conftest import Stack
from tests.proxy.stage import Tenant


@pytest.fixture
def tenant(stack: Stack, request: pytest.FixtureRequest) -> Iterator[Tenant]:
    """A tenant of this test's own."""
    name = request.node.name.replace("_", "-")[5:40].rstrip("-")
    yield stack.control.bootstrap(name)


def usage(stack: Stack, tenant: Tenant, op: str) -> int:
    return int(
        stack.control.one(
            "SELECT coalesce(sum(msgs), 0) FROM queen_proxy.usage_minutes WHERE cluster_id = %s AND op_class = %s",
            tenant.cluster_id,
            op,
        )
    )


def test_sizes_are_capped_in_shadow_mode_too(stack: Stack, tenant: Tenant) -> None:
    big = stack.push(tenant.slug, "x", "y" * 300_000, tenant=tenant)
    assert big.status == 413
    assert big.json() == {
        "code": "payload_too_large",
        "error": "item 1: payload 300002 bytes exceeds max_payload_bytes (262144)",
    }
    many = stack.push(tenant.slug, *range(1001), tenant=tenant)
    assert (many.status, many.json()["error"]) == (413, "batch of 1001 items exceeds max_batch_items (1000)")


def test_revoked_key_is_refused_at_once(stack: Stack, tenant: Tenant) -> None:
    assert stack.push(tenant.slug, 1, tenant=tenant).status == 201
    stack.control.one(
        "SELECT queen_proxy.revoke_api_key(id) FROM queen_proxy.api_keys WHERE cluster_id = %s", tenant.cluster_id
    )
    wait_until(lambda: stack.push(tenant.slug, 1, tenant=tenant).status == 401, 5, "the revoked key is refused")


def test_states_take_effect_at_once(stack: Stack, tenant: Tenant) -> None:
    def answers(status: int, code: str | None) -> None:
        def seen() -> bool:
            response = stack.push(tenant.slug, 1, tenant=tenant)
            return response.status == status and (code is None or response.json()["code"] == code)

        wait_until(seen, 5, f"{status} {code}")

    stack.control.one("SELECT queen_proxy.set_cluster_status(%s, 'suspended')", tenant.cluster_id)
    answers(403, "cluster_suspended")
    stack.control.one("SELECT queen_proxy.set_cluster_status(%s, 'active')", tenant.cluster_id)
    answers(201, None)
    stack.control.one("SELECT queen_proxy.set_tenant_status(%s, 'grace')", tenant.tenant_id)
    answers(403, "push_blocked")
    assert stack.pop(tenant.slug, tenant=tenant).status == 200


def test_storage_quota_blocks_pushes_and_not_pops(stack: Stack, tenant: Tenant) -> None:
    assert stack.push(tenant.slug, "x" * 1000, tenant=tenant).status == 201
    override = json.dumps({"max_retained_bytes": 64})
    stack.control.one("SELECT queen_proxy.set_limit_override(%s, %s)", tenant.cluster_id, override)

    def refused() -> bool:
        response = stack.push(tenant.slug, 1, tenant=tenant)
        return response.status == 403 and response.json()["code"] == "storage_quota_exceeded"

    wait_until(refused, 60, "pushes are blocked")
    assert stack.pop(tenant.slug, tenant=tenant).status == 200
    stack.control.one("SELECT queen_proxy.set_limit_override(%s, NULL)", tenant.cluster_id)
    wait_until(lambda: stack.push(tenant.slug, 1, tenant=tenant).status == 201, 60, "pushes pass again")


def test_another_cluster_s_key_is_refused(stack: Stack, tenant: Tenant) -> None:
    response = stack.request("POST", "/api/v1/push", {"items": []}, tenant, Host=f"{stack.acme.slug}.local.test")
    assert (response.status, response.json()["error"]) == (403, "key/cluster mismatch")


def test_usage_adds_up_also_after_a_kill(stack: Stack, tenant: Tenant) -> None:
    for number in range(20):
        assert stack.push(tenant.slug, number, number, tenant=tenant, transactionId=f"t{number}").status == 201
    stack.proxy.kill_worker()
    stack.proxy.wait_healthy()
    stack.push(tenant.slug, "again", tenant=tenant, transactionId="t0")
    assert len(stack.pop(tenant.slug, tenant=tenant).json()["messages"]) == 20
    stack.proxy.restart()
    wait_until(lambda: usage(stack, tenant, "push") == 20, 60, "every pushed message is counted once")
    assert usage(stack, tenant, "delivery") == 20
