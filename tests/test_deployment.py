"""What conf/ ships can be used: units, stack, manifest, balancer and image are read by whoever is there to read
them, name variables that exist, and start what they say."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from queen.db.embedded import free_port
from queen.proxy.settings import ProxySettings
from queen.settings import Settings
from tests.broker import HOST, ROOT, Broker, wait_until
from tests.conftest import Brokers

CONF = ROOT / "conf"
UNITS = ["queen.service", "queen-proxy.service"]
OTHERS = {"WEB_CONCURRENCY", "POSTGRES_PASSWORD", "JWT_ENABLED", "JWT_ALGORITHM", "JWT_SECRET"}
OTHERS |= {"QUEEN_TENANCY_HEADER", "QUEEN_KV_TRUSTED_PROXY"}
GUNICORN = Path(sys.executable).with_name("gunicorn")


def known_variables() -> set[str]:
    settings = [*fields(Settings), *fields(ProxySettings)]
    return {name for s in settings if "variable" in s.metadata for name in s.metadata["variable"].names} | OTHERS


def unit(name: str) -> ConfigParser:
    parser = ConfigParser(strict=False, interpolation=None, comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(CONF / name)
    return parser


def graceful(name: str) -> int:
    """graceful_timeout of one of gunicorn's configurations, in seconds."""
    namespace: dict[str, Any] = {}
    exec((CONF / name).read_text(), namespace)
    return int(namespace["graceful_timeout"])


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_runs_a_configuration_that_exists_and_lets_it_stop(name: str) -> None:
    service = unit(name)["Service"]
    command = service["ExecStart"].split()
    config = command[command.index("-c") + 1]
    assert (ROOT / config).exists()
    assert int(service["TimeoutStopSec"]) > graceful(Path(config).name)
    assert (service["Type"], service["KillMode"]) == ("notify", "mixed")
    assert service["User"] != "root"
    example = CONF / Path(service["EnvironmentFile"]).name
    assert set(re.findall(r"^#?([A-Z][A-Z_]+)=", example.read_text(), re.MULTILINE)) <= known_variables()
    assert service["Environment"].split("=")[0] in known_variables()


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
@pytest.mark.parametrize("name", UNITS)
def test_systemd_accepts_a_unit(name: str, tmp_path: Path) -> None:
    text = (CONF / name).read_text().replace("/opt/queen/venv/bin/gunicorn", str(GUNICORN))
    (tmp_path / name).write_text(text.replace("/opt/queen", str(ROOT)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)], capture_output=True, text=True, timeout=60
    )
    assert [line for line in done.stderr.splitlines() if name in line] == []
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["gunicorn.conf.py", "gunicorn-proxy.conf.py"])
def test_gunicorn_accepts_its_configuration(name: str) -> None:
    application = "queen.proxy.wsgi" if "proxy" in name else "queen.wsgi"
    command = [sys.executable, "-m", "gunicorn", "--print-config", "-k", "gevent", "-c", f"conf/{name}", "flask:Flask"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert application.split(".")[0] == "queen"
    assert re.search(r"^worker_class\s+= gevent$", done.stdout, re.MULTILINE)


def environment_of(service: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in service["environment"].items()}


def stack() -> dict[str, Any]:
    composed: dict[str, Any] = yaml.safe_load((CONF / "docker-compose.yml").read_text())
    return composed


def test_the_stack_is_two_brokers_apart_and_a_proxy() -> None:
    services = stack()["services"]
    a, b = environment_of(services["queen-a"]), environment_of(services["queen-b"])
    assert {*a, *b, *environment_of(services["proxy"]), *environment_of(services["pg"])} <= known_variables()
    assert a["QUEEN_SERVER_ID"] != b["QUEEN_SERVER_ID"]
    assert a["QUEEN_MESH_PEERS"] == "queen-b:6633" and b["QUEEN_MESH_PEERS"] == "queen-a:6633"
    assert services["queen-a"]["volumes"] != services["queen-b"]["volumes"]  # a shared spool is corruption
    assert a["QUEEN_SYNC_SECRET"] == b["QUEEN_SYNC_SECRET"] == "${MESH_SECRET:?set MESH_SECRET}"
    for name in ("queen-a", "queen-b", "proxy"):
        service = services[name]
        assert service["depends_on"]["pg"]["condition"] == "service_healthy"
        assert int(service["stop_grace_period"].removesuffix("s")) > graceful("gunicorn.conf.py")
        assert (CONF / service["build"]["context"] / service["build"]["dockerfile"]).exists()
    assert (CONF / "initdb" / "01-proxy-db.sql").read_text().count("CREATE DATABASE queen_proxy;") == 1


def test_the_image_copies_and_runs_what_exists() -> None:
    text = (CONF / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split()), line
    commands = [json.loads(line) for line in re.findall(r"^CMD (\[.+\])$", text, re.MULTILINE)]
    assert len(commands) == 2
    for command in commands:
        assert command[0] == "gunicorn" and (ROOT / command[command.index("-c") + 1]).exists()
    assert set(re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE)) == {"base", "queen", "queen-proxy"}


def test_the_brokers_of_the_stack_run_as_composed(brokers: Brokers) -> None:
    """The stack without Docker: its environment, with this machine's addresses for its names."""
    services = stack()["services"]
    here = {"QUEEN_MESH_PEERS": "", "JWT_ENABLED": "false", "QUEEN_TENANCY_HEADER": "false", "QUEEN_SYNC_SECRET": "s"}
    pair = []
    for name in ("queen-a", "queen-b"):
        environment = {
            key: value
            for key, value in environment_of(services[name]).items()
            if not key.startswith(("PG_", "FILE_BUFFER", "QUEEN_MESH_PORT"))
        }
        pair.append(brokers({**environment, **here}))
    a, b = pair
    a.push([{"queue": "orders", "partition": "customer-42", "payload": {"hello": "world"}}])
    (message,) = b.pop("orders", consumerGroup="demo", subscriptionMode="all", wait=True, timeout=20000)
    assert message["data"] == {"hello": "world"}
    a.stop()
    assert b.ack(message, consumerGroup="demo")["success"]


def test_the_manifest_fits_together() -> None:
    documents = list(yaml.safe_load_all((CONF / "kubernetes.yaml").read_text()))
    kinds = [document["kind"] for document in documents]
    assert kinds.count("StatefulSet") == kinds.count("NetworkPolicy") == 1
    (brokers,) = (d["spec"] for d in documents if d["kind"] == "StatefulSet")
    (configuration,) = (d["data"] for d in documents if d["kind"] == "ConfigMap")
    (policy,) = (d["spec"] for d in documents if d["kind"] == "NetworkPolicy")
    pod = brokers["template"]["spec"]
    (container,) = pod["containers"]
    assert {*configuration, *(e["name"] for e in container["env"])} <= known_variables()
    assert pod["terminationGracePeriodSeconds"] > 5 + graceful("gunicorn.conf.py")
    assert len(configuration["QUEEN_MESH_PEERS"].split(",")) == brokers["replicas"]
    assert brokers["serviceName"] in [d["metadata"]["name"] for d in documents if d["kind"] == "Service"]
    # The mesh port is open to brokers alone.
    (mesh,) = (rule for rule in policy["ingress"] if rule["ports"][0]["port"] == 6633)
    assert mesh["from"] == [{"podSelector": brokers["selector"]}]
    assert all(probe["httpGet"]["path"] == "/status" for name, probe in container.items() if name.endswith("Probe"))


NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def balancer(directory: Path, port: int, backends: list[int]) -> Path:
    """conf/nginx.conf for this machine: its ports, and files that a test may write."""
    text = (CONF / "nginx.conf").read_text()
    for default, backend in zip((6632, 6642), backends, strict=True):
        text = text.replace(f"server {HOST}:{default} ", f"server {HOST}:{backend} ")
    text = text.replace("listen 8080 ", f"listen {HOST}:{port} ").replace("user www-data;", "")
    text = text.replace("/run/nginx.pid", f"{directory}/pid").replace("/var/log/nginx/error.log", f"{directory}/log")
    temporary = "".join(
        f"    {kind}_temp_path {directory}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    path = directory / "nginx.conf"
    path.write_text(text.replace("http {\n", f"http {{\n{temporary}"))
    return path


@pytest.mark.skipif(not NGINX, reason="nginx is not installed")
def test_nginx_balances_two_brokers_of_which_one_leaves(brokers: Brokers, tmp_path: Path) -> None:
    assert NGINX
    pair = [brokers(), brokers()]
    front = Broker(tmp_path / "front", {}, "nginx")
    config = balancer(tmp_path, front.port, [broker.port for broker in pair])
    checked = subprocess.run([NGINX, "-t", "-c", str(config)], capture_output=True, text=True, timeout=30)
    assert checked.returncode == 0, checked.stderr
    nginx = subprocess.Popen([NGINX, "-c", str(config), "-g", "daemon off;"])
    try:

        def answers() -> bool:
            try:
                return front.request("GET", "/health").status == 200
            except OSError:
                return False

        wait_until(answers, 20, "nginx answers")
        for n in range(20):
            front.push([{"queue": "a/b%", "partition": f"p{n}", "payload": n}])
        assert pair[0].request("GET", "/api/v1/resources/queues/a%2Fb%25").status == 200
        assert pair[1].stop() == 0
        for n in range(20, 40):
            front.push([{"queue": "a/b%", "partition": f"p{n}", "payload": n}])
        got = front.pop("a/b%", subscriptionMode="all", batch=100, partitions=100)
        assert sorted(m["data"] for m in got) == list(range(40))
        assert front.request("GET", "/internal/api/shared-state/stats").status == 404
    finally:
        nginx.terminate()
        nginx.wait(10)


def test_the_bare_command_serves_with_defaults_and_says_what_they_are(tmp_path: Path, database: Any) -> None:
    port = free_port()
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "QUEEN_", "JWT_", "FILE_", "PORT"))}
    log = tmp_path / "log"
    with log.open("wb") as output:
        gunicorn = subprocess.Popen(
            [sys.executable, "-m", "gunicorn", "-k", "gevent", "-b", f"{HOST}:{port}", "queen.wsgi"],
            cwd=ROOT,
            env={**inherited, **database.environment()},
            stdout=output,
            stderr=output,
        )
    try:
        broker = Broker(tmp_path / "bare", {})
        broker.port = port

        def healthy() -> bool:
            try:
                return broker.request("GET", "/health").status == 200
            except OSError:
                return False

        wait_until(healthy, 60, "the bare command serves")
        assert broker.push([{"queue": "q", "payload": 1}])[0]["status"] == "queued"
        text = log.read_text()
        assert f"config: gunicorn bind={HOST}:{port} workers=1 keepalive_s=2 " in text
        assert "idle connections are closed after 2 s" in text
        for block in ("server", "postgres", "security", "file_buffer", "engine", "flow", "jobs", "sync", "logging"):
            assert f"boot: config: {block} " in text
    finally:
        gunicorn.terminate()
        gunicorn.wait(40)
