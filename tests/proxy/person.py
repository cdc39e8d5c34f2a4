"""Somebody with a browser: a cookie, pages, forms."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

from tests.broker import Broker, Response

PASSWORD = "initial-password"
# What makes a proxy one for people, here one that believes its tests who is asking.
PEOPLE = {
    "QUEEN_PROXY_JWT_SECRET": "5e" * 32,
    "QUEEN_PROXY_OPERATOR_ENABLED": "true",
    "QUEEN_PROXY_TRUSTED_PROXIES": "127.0.0.1",
    "QUEEN_PROXY_METER_FLUSH_MS": "500",
}

_addresses: Iterator[int] = itertools.count(1)


class Person:
    """One visitor of a proxy, on one host, from an address of their own."""

    def __init__(self, proxy: Broker, host: str = "acme-prod.local.test") -> None:
        self.proxy = proxy
        self.host = host
        self.cookie = ""
        number = next(_addresses)
        self.address = f"198.51.{number // 250}.{number % 250 + 1}"

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> Response:
        """Send a request with the cookie; keywords are headers, "" leaves one out."""
        fields = {"Host": self.host, "X-Forwarded-For": self.address, "Cookie": f"queen_session={self.cookie}"}
        fields |= {name.replace("_", "-"): text for name, text in headers.items()}
        if not self.cookie:
            del fields["Cookie"]
        return self.proxy.request(method, path, body, {name: text for name, text in fields.items() if text})

    def get(self, path: str, **headers: str) -> Response:
        return self.request("GET", path, **headers)

    def post(self, path: str, fields: dict[str, Any], **headers: str) -> Response:
        """Send a form as a browser does from a page of the same site, and take the cookie that comes back."""
        given = {"Content-Type": "application/x-www-form-urlencoded", "Sec-Fetch-Site": "same-origin"} | headers
        response = self.request("POST", path, urlencode(fields, doseq=True).encode(), **given)
        for cookie in response.headers.get_all("Set-Cookie") or []:
            self.cookie = cookie.partition("=")[2].partition(";")[0]
        return response

    def sign_in(self, email: str, password: str = PASSWORD, **fields: str) -> Response:
        return self.post("/auth/login", {"email": email, "password": password, **fields})

    def token(self, path: str = "/console/account") -> str:
        """What the forms of the session carry."""
        match = re.search(r'name="token" value="([0-9a-f]+)"', self.get(path).body.decode())
        assert match
        return match[1]
