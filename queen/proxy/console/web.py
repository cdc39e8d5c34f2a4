"""What protects the pages in a browser: headers, the session cookie, tokens of forms, safe ways back."""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Any
from urllib.parse import urlsplit

from flask import Response, request

from queen.proxy.refusals import forbidden
from queen.proxy.settings import ProxySettings

# No script, style or image but our own files, no frame around a page, no form that goes elsewhere.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
_CONTROL = re.compile("[\x00-\x1f\x7f]")


def protect(response: Response) -> Response:
    """Adds the headers that every answer of the console and the sign-in has."""
    headers = response.headers
    headers.setdefault("Content-Security-Policy", _POLICY)
    headers.setdefault("X-Content-Type-Options", "nosniff")
    headers.setdefault("X-Frame-Options", "DENY")
    headers.setdefault("Referrer-Policy", "no-referrer")
    headers.setdefault("Cross-Origin-Opener-Policy", "same-origin")
    headers.setdefault("Cache-Control", "no-store")
    return response


def safe_next(text: str | None) -> str:
    """A path of this host to go on to; anything else becomes ``/``."""
    if not text or not text.startswith("/") or text.startswith(("//", "/\\")):
        return "/"
    if "://" in text or "\\" in text or _CONTROL.search(text):
        return "/"
    return text


def form_token(session_token: str) -> str:
    """What a form carries to show that it came from a page of this session: a hash of the cookie's secret."""
    return hashlib.sha256(b"form:" + session_token.encode()).hexdigest()


def check_form(session_token: str) -> None:
    """Raises `Refusal` 403 unless the posted form came from one of our pages, in this session."""
    check_origin()
    if not hmac.compare_digest(request.form.get("token", "").encode(), form_token(session_token).encode()):
        raise forbidden("this form is out of date: go back, reload the page and try again")


def check_origin() -> None:
    """Raises `Refusal` 403 for a request that a page of another site has a browser send."""
    site = request.headers.get("Sec-Fetch-Site", "")
    if site and site not in ("same-origin", "none"):
        raise forbidden("requests from other sites are refused")
    origin = request.headers.get("Origin", "")
    # A page without a referrer, as ours are, sends `null` with its forms; Sec-Fetch-Site told already.
    if origin and not (origin == "null" and site) and urlsplit(origin).netloc != request.headers.get("Host", ""):
        raise forbidden("requests from other sites are refused")


def set_cookie(response: Response, settings: ProxySettings, token: str) -> None:
    """Gives the browser a session."""
    response.headers.add("Set-Cookie", _cookie(settings, token, settings.jwt_ttl_s))


def clear_cookie(response: Response, settings: ProxySettings) -> None:
    """Takes the session from the browser."""
    response.headers.add("Set-Cookie", _cookie(settings, "", 0))


def _cookie(settings: ProxySettings, value: str, seconds: int) -> str:
    parts = [f"{settings.cookie_name}={value}", "Path=/", "HttpOnly", "SameSite=Lax", f"Max-Age={seconds}"]
    if settings.cookie_domain:
        parts.append(f"Domain={settings.cookie_domain}")
    if settings.cookie_domain or is_https(request.environ):
        parts.append("Secure")
    return "; ".join(parts)


def is_https(environ: dict[str, Any]) -> bool:
    """Whether the browser came by TLS, to us or to whom forwards to us."""
    return environ.get("wsgi.url_scheme") == "https" or environ.get("HTTP_X_FORWARDED_PROTO", "").lower() == "https"
