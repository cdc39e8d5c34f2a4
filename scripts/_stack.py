"""What the stack consists of: its directory, ports and secrets, and the settings of each server in it.

PostgreSQL, two brokers that know each other, and the proxy before them, as one would have them on several
machines; all of it listens on the loopback address.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _checkout import fail
from _service import Service, gunicorn

HOST = "127.0.0.1"
PXDB = "queen_proxy"
BROKERS = ("queen-a", "queen-b")
PROXY = "proxy"
SERVICES = (*BROKERS, PROXY)
SECRETS = ("CELL_JWT_SECRET", "MESH_SECRET", "SESSION_SECRET")


@dataclass(frozen=True)
class Ports:
    """Where everything but PostgreSQL listens."""

    queen_a: int = 6632
    queen_b: int = 6642
    proxy: int = 6711
    mesh_a: int = 6633
    mesh_b: int = 6643

    @classmethod
    def moved_by(cls, offset: int) -> Ports:
        """Return the usual ports with an offset added to each."""
        return cls(**{name: port + offset for name, port in asdict(cls()).items()})


class Stack:
    """The stack whose files are in one directory, running or not."""

    def __init__(self, directory: Path) -> None:
        """Takes the directory: it need not be there."""
        self.directory = directory
        self.lock = directory / "lock"
        self.state_file = directory / "state.json"
        self.secrets_file = directory / ".env"
        self.postgres_dir = directory / "postgresql"
        self.own_log = directory / "stack.log"

    def make(self) -> None:
        """Make the directory. Others on this machine have no business in it, but PostgreSQL's account passes."""
        self.directory.mkdir(mode=0o711, parents=True, exist_ok=True)
        (self.directory / "held").mkdir(exist_ok=True)

    def log(self, service: str) -> Path:
        """Return the file that a service's output is appended to."""
        return self.directory / f"{service}.log"

    def held(self, service: str) -> Path:
        """Return the file whose presence keeps a service stopped."""
        return self.directory / "held" / service

    def state(self) -> dict[str, Any]:
        """Return what the running, or last, `up` noted about itself; empty when there was none."""
        try:
            return dict(json.loads(self.state_file.read_text()))
        except (FileNotFoundError, ValueError):
            return {}

    def write_state(self, state: dict[str, Any]) -> None:
        """Replace that note at once, so that no reader sees half of it."""
        new = self.state_file.with_suffix(".new")
        new.write_text(json.dumps(state, indent=1))
        new.replace(self.state_file)

    def secrets(self) -> dict[str, str]:
        """Return the three secrets; the first call makes them. Ends the script when one is missing."""
        if not self.secrets_file.exists():
            lines = "".join(f"{name}={secrets.token_hex(32)}\n" for name in SECRETS)
            unfinished = self.secrets_file.with_suffix(".new")
            unfinished.unlink(missing_ok=True)
            with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(lines)
            unfinished.rename(self.secrets_file)
        found = dict(line.split("=", 1) for line in self.secrets_file.read_text().splitlines() if "=" in line)
        missing = [name for name in SECRETS if not found.get(name, "").strip()]
        if missing:
            fail(f"{self.secrets_file} doesn't set {', '.join(missing)}. Put a long random text there, or remove it.")
        return {name: found[name].strip() for name in SECRETS}

    def cell_token(self) -> str:
        """Return the token that the proxy presents to the brokers: HS256, without an end."""
        key = self.secrets()["CELL_JWT_SECRET"].encode()
        claims = '{"sub":"queen-proxy","role":"admin"}'
        signed = ".".join(_base64url(part.encode()) for part in ('{"alg":"HS256","typ":"JWT"}', claims))
        return f"{signed}.{_base64url(hmac.digest(key, signed.encode(), hashlib.sha256))}"

    def services(self, ports: Ports, postgres: dict[str, str]) -> list[Service]:
        """Return the brokers and the proxy, none started.

        Takes the ports and the PG_* variables of the server.
        """
        keys = self.secrets()
        inherited = {name: value for name, value in os.environ.items() if name not in ("QUEEN_RUN_DIR", "PORT")}
        places = {
            "queen-a": (ports.queen_a, ports.mesh_a, ports.mesh_b),
            "queen-b": (ports.queen_b, ports.mesh_b, ports.mesh_a),
        }
        services = []
        for name, (port, mesh, peer) in places.items():
            environment = {
                **inherited,
                **postgres,
                "PORT": str(port),
                "QUEEN_BIND_ADDR": HOST,
                "QUEEN_SERVER_ID": name,
                "QUEEN_MESH_BIND_ADDR": HOST,
                "QUEEN_MESH_PORT": str(mesh),
                "QUEEN_MESH_PEERS": f"{HOST}:{peer}",
                "QUEEN_SYNC_SECRET": keys["MESH_SECRET"],
                "JWT_ENABLED": "true",
                "JWT_ALGORITHM": "HS256",
                "JWT_SECRET": keys["CELL_JWT_SECRET"],
                "QUEEN_TENANCY_HEADER": "true",
                "QUEEN_KV_TRUSTED_PROXY": "true",
                "FILE_BUFFER_DIR": str(self.directory / f"{name}.buffers"),
            }
            command = gunicorn("conf/gunicorn.conf.py", "queen.wsgi")
            services.append(Service(name, command, environment, self.log(name), HOST, port, "/health"))
        environment = {
            **inherited,
            "QUEEN_PROXY_PORT": str(ports.proxy),
            "QUEEN_PROXY_BIND_ADDR": HOST,
            "QUEEN_PROXY_JWT_SECRET": keys["SESSION_SECRET"],
            "QUEEN_PROXY_SPOOL_DIR": str(self.directory / "proxy.spool"),
            "PXDB_HOST": postgres["PG_HOST"],
            "PXDB_PORT": postgres["PG_PORT"],
            "PXDB_USER": postgres["PG_USER"],
            "PXDB_PASSWORD": postgres["PG_PASSWORD"],
            "PXDB_DB": PXDB,
        }
        command = gunicorn("conf/gunicorn-proxy.conf.py", "queen.proxy.wsgi")
        services.append(Service(PROXY, command, environment, self.log(PROXY), HOST, ports.proxy, "/healthz"))
        return services


def base_url(ports: Ports) -> str:
    """Return the address of the cell: both brokers, of which the proxy takes the next when one fails."""
    return f"http://{HOST}:{ports.queen_a},{HOST}:{ports.queen_b}"


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
