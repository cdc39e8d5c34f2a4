"""Walk through the front door of a running stack: each command as one would type it, and its answer.

The cell and a tenant are made in the proxy's database, a message goes in and comes out, what must be refused
is refused, and a broker is stopped in between. It can be repeated.
"""

from __future__ import annotations

import http.client
import json
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

from _checkout import fail, say
from _service import tail
from _stack import HOST, Ports, Stack, base_url

SLUG = "acme-prod"
EMAIL = "ops@acme.example"
PASSWORD = "initial-password"

PUSH = '{"items":[{"queue":"orders","partition":"customer-42","payload":{"hello":"world"}}]}'
POP = "/api/v1/pop/queue/orders?batch=1&wait=true&consumerGroup=demo&subscriptionMode=all"


class Walk:
    """Prints and does one step after another; `surprises` are the answers that were not as they should be."""

    def __init__(self, stack: Stack, ports: Ports) -> None:
        self._stack = stack
        self._ports = ports
        self.key = ""
        self.surprises: list[str] = []

    def curl(
        self,
        port: int,
        method: str,
        path: str,
        expected: int,
        body: str | None = None,
        host: bool = True,
        key: str | None = "$KEY",
    ) -> Any:
        """Send a request, shown as a curl command, and return the decoded answer.

        Takes where it goes, the status that must come back, and whether the two headers go along.
        """
        words = ["curl", "-s", *(["-X", method] if method != "GET" else []), f'"http://localhost:{port}{path}"']
        shown = [" ".join(words)]
        headers = {}
        if host:
            headers["Host"] = f"{SLUG}.local.test"
            shown.append(f'-H "Host: {headers["Host"]}"')
        if key:
            headers["Authorization"] = f"Bearer {key.replace('$KEY', self.key)}"
            shown.append(f'-H "Authorization: Bearer {key}"')
        if body is not None:
            headers["Content-Type"] = "application/json"
            shown.append("-H 'Content-Type: application/json'")
            shown.append(f"-d '{body}'")
        say("\n$ " + " \\\n    ".join(shown))
        connection = http.client.HTTPConnection(HOST, port, timeout=60)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            text = response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            fail(f"No answer: {error}")
        finally:
            connection.close()
        say(f"{response.status}  {text}")
        if response.status != expected:
            self.surprises.append(
                f"{method} {path.partition('?')[0]} at port {port}: {response.status}, not {expected}"
            )
            say(f"That should have been {expected}.")
        return json.loads(text) if text else None

    def psql(self, statement: str, shown: str | None = None) -> str:
        """Run a statement on the proxy's database through `scripts/stack psql`, and return what it printed."""
        say(f"\n$ scripts/stack psql -tA <<'SQL'\n{shown or statement}\nSQL")
        done = self._script("psql", "-tA", "-v", "ON_ERROR_STOP=1", statement=statement)
        say(done.strip())
        return done.strip()

    def stack(self, *arguments: str) -> None:
        """Run another command of the stack."""
        say(f"\n$ scripts/stack {' '.join(arguments)}")
        say(self._script(*arguments).strip())

    def mesh_lines(self, name: str) -> None:
        """Show what a broker says of its peers."""
        say(f"\n$ scripts/stack logs {name} | grep mesh")
        lines = [line for line in tail(self._stack.log(name), 2000).splitlines() if " mesh: " in line]
        say("\n".join(lines[-3:]) or "(nothing)")

    def _script(self, *arguments: str, statement: str | None = None) -> str:
        command = [sys.executable, str(Path(__file__).with_name("stack"))]
        command += ["--directory", str(self._stack.directory), *arguments]
        done = subprocess.run(command, input=statement, capture_output=True, text=True)
        if done.returncode:
            fail(f"{done.stdout}{done.stderr}")
        return done.stdout


def walk(stack: Stack) -> None:
    """Do all of it on a running stack."""
    ports = Ports(**stack.state()["ports"])
    step = Walk(stack, ports)
    title("The brokers and the proxy are up")
    for port, path in ((ports.queen_a, "/health"), (ports.queen_b, "/health"), (ports.proxy, "/healthz")):
        step.curl(port, "GET", path, 200, host=False, key=None)

    title("A broker lets nobody in without a token")
    step.curl(ports.queen_a, "GET", "/api/v1/resources/queues", 401, host=False, key=None)

    title("Register the cell: where its brokers are, and the token that the proxy shows them")
    cell = (
        "INSERT INTO queen_proxy.cells (slug, region, base_url, class, cell_secret)\n"
        f"VALUES ('local', 'local', '{base_url(ports)}', 'shared', '%s')\n"
        "ON CONFLICT (slug) DO UPDATE SET base_url = EXCLUDED.base_url, cell_secret = EXCLUDED.cell_secret;"
    )
    step.psql(cell % stack.cell_token(), cell % "$CELL_SECRET")

    title("Onboard a tenant: its cluster, its admin and its first key")
    answer = json.loads(step.psql(bootstrap("default")))
    if answer["api_key"] is None:
        say("\nThe tenant was there already, and its key was shown only once. So let it have another:")
        answer = json.loads(step.psql(bootstrap(f"demo-{secrets.token_hex(3)}")))
    step.key = answer["api_key"]
    say(f"\n$ export KEY={step.key}")

    title("Through the front door")
    step.curl(ports.proxy, "POST", "/api/v1/push", 201, PUSH)
    popped = step.curl(ports.proxy, "GET", POP, 200)
    if not popped or not popped.get("messages"):
        fail("The message didn't come back.")
    message = popped["messages"][0]
    say(f"\nIts producerSub is {message['producerSub']}: who vouched for the push to the broker.")
    ack = json.dumps({name: message[name] for name in ("partitionId", "transactionId", "leaseId", "consumerGroup")})
    step.curl(ports.proxy, "POST", "/api/v1/ack", 200, ack)

    title("Without the key, or without the host, nobody gets in")
    step.curl(ports.proxy, "POST", "/api/v1/push", 401, PUSH, key=None)
    step.curl(ports.proxy, "POST", "/api/v1/push", 401, PUSH, host=False)
    step.curl(ports.proxy, "POST", "/api/v1/push", 401, PUSH, key="qk_live_" + "x" * 43)

    title("Stop one broker: the next request goes to the other")
    for name in ("queen-a", "queen-b"):
        step.stack("stop", name)
        step.curl(ports.proxy, "POST", "/api/v1/push", 201, PUSH)
        step.stack("start", name)
    step.mesh_lines("queen-a")

    if step.surprises:
        fail("Not all of it was as it should be:\n  " + "\n  ".join(step.surprises))
    say(
        f"\nThat was all of it. The console: http://{SLUG}.localhost:{ports.proxy}/console\n"
        f"Sign in as {EMAIL} with the password {PASSWORD}."
    )


def bootstrap(key_name: str) -> str:
    """Return the call that makes the tenant, or finds it."""
    return (
        "SELECT queen_proxy.bootstrap_tenant(\n"
        f"  'acme', 'Acme Inc', '{SLUG}', 'free',\n"
        "  (SELECT id FROM queen_proxy.cells WHERE slug = 'local'),\n"
        f"  '{EMAIL}', '{PASSWORD}', '{key_name}'\n"
        ");"
    )


def title(text: str) -> None:
    """Print what the next steps are about."""
    say(f"\n== {text} ==")
