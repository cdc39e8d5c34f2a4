"""What the proxy refuses to start with, and how it reads the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from queen.proxy.clusters import effective, worst
from queen.proxy.settings import ProxySettings, normal_host
from queen.settings import SettingsError


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "nothing to serve"),
        ({"PXDB_HOST": "pg", "QUEEN_PROXY_TLS_CERT": "/c"}, "QUEEN_PROXY_TLS_CERT set without QUEEN_PROXY_TLS_KEY"),
        ({"PXDB_HOST": "pg", "QUEEN_PROXY_TLS_KEY": "/k"}, "QUEEN_PROXY_TLS_KEY set without QUEEN_PROXY_TLS_CERT"),
        ({"PXDB_HOST": "pg", "QUEEN_PROXY_BIND_ADDR": ""}, "QUEEN_PROXY_BIND_ADDR"),
        ({"PXDB_HOST": "pg", "QUEEN_PROXY_BIND_ADDR": "0.0.0.0:6711"}, "must be a host without a port"),
        ({"QUEEN_PROXY_DEV_CELL_URL": "http://b", "QUEEN_PROXY_SHARED_HOSTS": "q.example"}, "q.example"),
        ({"PXDB_HOST": "pg", "PXDB_SSL_ROOT_CERT": "/path/of/a/file"}, "PXDB_SSL_ROOT_CERT"),
        ({"PXDB_HOST": "pg", "QUEEN_PROXY_BALANCE": "random"}, "must be pinned or spread"),
    ],
)
def test_refused_at_boot(environ: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        ProxySettings.read(environ)


def test_files_without_the_block_they_should_have_are_refused(tmp_path: Path) -> None:
    for name in ("cert", "key"):
        (tmp_path / name).write_text("nothing")
    environ = {
        "PXDB_HOST": "pg",
        "QUEEN_PROXY_TLS_CERT": str(tmp_path / "cert"),
        "QUEEN_PROXY_TLS_KEY": str(tmp_path / "key"),
    }
    with pytest.raises(SettingsError, match="no such PEM block"):
        ProxySettings.read(environ)


def test_only_the_word_true_is_true_and_odd_numbers_mean_the_default() -> None:
    settings = ProxySettings.read(
        {"PXDB_HOST": "pg", "QUEEN_PROXY_ENFORCE": "1", "QUEEN_PROXY_PORT": "many", "PXDB_TIMEOUT_MS": "1"}
    )
    assert (settings.enforce, settings.port, settings.pxdb_timeout_ms) == (False, 6711, 100)


@pytest.mark.parametrize(
    ("host", "normal"),
    [
        ("ACME-prod.eu1.example.com:6711", "acme-prod.eu1.example.com"),
        ("acme-prod.", "acme-prod"),
        (":6711", ""),
        (".", ""),
        ("weird:notaport.example.com", "weird:notaport.example.com"),
    ],
)
def test_hosts_are_compared_without_port_case_and_dots(host: str, normal: str) -> None:
    assert normal_host(host) == normal


def test_an_override_replaces_lifts_or_is_passed_over() -> None:
    plan = {"max_queues": 20, "req_burst": 5, "max_req_per_sec": 1}
    limits = effective(plan, {"max_queues": 7, "req_burst": None, "max_req_per_sec": "many"})
    assert (limits.max_queues, limits.req_burst, limits.max_req_per_sec) == (7, None, 1)


def test_the_worse_state_rules() -> None:
    assert worst("grace", "active") == "push_blocked"
    assert worst("active", "nonsense") == "suspended"
    assert worst("deleting", "suspended") == "deleting"
