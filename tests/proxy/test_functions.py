"""The functions that operators call: their answers, their refusals, and what they leave behind."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

import psycopg
import pytest

from queen.proxy import migrations
from tests.proxy.stage import ControlPlane


@pytest.fixture(scope="module")
def control(pxdb: tuple[dict[str, str], str]) -> Iterator[ControlPlane]:
    """A control plane with one cell."""
    migrations.apply(pxdb[1])
    migrations.apply(pxdb[1])
    control = ControlPlane(pxdb[1])
    control.add_cell("http://queen:6632")
    yield control
    control.close()


def call(control: ControlPlane, *arguments: str | None) -> str:
    """What `psql -tA` prints for a bootstrap_tenant with these arguments."""
    cell = "(SELECT id FROM queen_proxy.cells WHERE slug = 'local')"
    places = ", ".join(["%s"] * 4 + [cell] + ["%s"] * (len(arguments) - 4))
    return str(control.one(f"SELECT queen_proxy.bootstrap_tenant({places})::text", *arguments))


def test_bootstrap_answers_four_keys_and_then_the_same_ids(control: ControlPlane) -> None:
    arguments = ("Acme", "Acme Inc", "Acme-prod", "free", "Ops@acme.example", "initial-password", "default")
    first = call(control, *arguments)
    uuid = "[0-9a-f-]{36}"
    assert re.fullmatch(
        f'{{"api_key": "qk_live_[A-Za-z0-9_-]{{43}}", "user_id": "{uuid}",'
        f' "tenant_id": "{uuid}", "cluster_id": "{uuid}"}}',
        first,
    )
    assert call(control, *arguments) == re.sub('"qk_live_[^"]+"', "null", first)
    assert '"qk_live_' in call(control, *arguments[:-1], "second")
    key_id = control.one("SELECT id FROM queen_proxy.api_keys WHERE name = 'default'")
    control.one("SELECT queen_proxy.revoke_api_key(%s)", key_id)
    assert '"qk_live_' in call(control, *arguments)
    with pytest.raises(psycopg.Error, match="already revoked"):
        control.one("SELECT queen_proxy.revoke_api_key(%s)", key_id)


def test_password_without_pgcrypto_verifies(control: ControlPlane) -> None:
    text = str(control.one("SELECT queen_proxy.hash_password('sésame')"))
    if text.startswith("$2a$"):
        return
    _, name, rounds, salt, digest = text.split("$")
    expected = hashlib.sha256(bytes.fromhex(salt) + "sésame".encode()).digest()
    for _ in range(int(rounds) - 1):
        expected = hashlib.sha256(expected + "sésame".encode()).digest()
    assert (name, digest) == ("sha256i", expected.hex())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("b", "B", "b-prod", "nonesuch", "a@b", None), "unknown plan nonesuch"),
        (("b", "B", "b_prod", "free", "a@b", None), "must be a DNS label"),
        (("b", "B", "b-prod", "free", "nobody", None), "must contain @"),
        (("b", "B", "acme-prod", "free", "a@b", None), "cluster slug acme-prod already belongs to tenant"),
        (("b", "B", "b-prod", "free", "ops@acme.example", None), "already belongs to tenant"),
    ],
)
def test_bootstrap_that_fails_leaves_nothing(control: ControlPlane, arguments: tuple[str], message: str) -> None:
    with pytest.raises(psycopg.Error, match=message):
        call(control, *arguments)
    assert control.one("SELECT count(*) FROM queen_proxy.tenants WHERE slug = 'b'") == 0


def test_roles_stay_inside_a_tenant(control: ControlPlane) -> None:
    other = control.bootstrap("other")
    with pytest.raises(psycopg.Error, match="belong to different tenants"):
        control.one("SELECT queen_proxy.grant_cluster_role(%s, 'ops@acme.example', 'viewer')", other.cluster_id)


def test_usage_is_added_once_rolled_up_and_pruned(control: ControlPlane) -> None:
    tenant = control.bootstrap("usage")
    rows = (
        "jsonb_build_array(jsonb_build_object('cluster_id', %s::text, 'minute', now() - interval '3 days',"
        " 'op_class', 'push', 'msgs', 5, 'reqs', 1, 'bytes_in', 1, 'bytes_out', 1))"
    )
    batch = "11111111-2222-3333-4444-555555555555"
    assert control.one(f"SELECT queen_proxy.add_usage(%s, {rows})", batch, tenant.cluster_id) is True
    assert control.one(f"SELECT queen_proxy.add_usage(%s, {rows})", batch, tenant.cluster_id) is False
    assert control.one("SELECT queen_proxy.prune_usage_minutes(1)") == 0
    for _ in range(2):
        assert control.one("SELECT queen_proxy.rollup_usage_days()") == 1
    month = "SELECT queen_proxy.cluster_month_msgs(%s, (now() - interval '3 days')::date)"
    assert control.one(month, tenant.cluster_id) == 5
    assert control.one("SELECT queen_proxy.prune_usage_minutes(1)") == 1
    assert control.one(month, tenant.cluster_id) == 5
    assert control.one(month, batch) == 0


def test_tenant_is_deleted_with_what_names_a_person(control: ControlPlane) -> None:
    tenant = control.bootstrap("leaving")
    with pytest.raises(psycopg.Error, match="not deleting"):
        control.one("SELECT queen_proxy.delete_tenant(%s)", tenant.tenant_id)
    control.one("SELECT queen_proxy.set_tenant_status(%s, 'deleting')", tenant.tenant_id)
    answer = control.one("SELECT queen_proxy.delete_tenant(%s)", tenant.tenant_id)
    assert (answer["deleted"], answer["counts"]["api_keys_revoked"], answer["counts"]["users"]) == (True, 1, 1)
    assert answer["clusters"][0]["cluster_id"] == tenant.cluster_id
    assert control.one("SELECT queen_proxy.delete_tenant(%s)", tenant.tenant_id)["existed"] is False
    assert control.one("SELECT count(*) FROM queen_proxy.outbox WHERE payload::text LIKE '%%ops@leaving%%'") == 0
