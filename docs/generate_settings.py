"""Writes docs/settings.rst and docs/proxy-settings.rst: run it after a change of either program's settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from queen.proxy.settings import ProxySettings
from queen.settings import Settings, Variable

PAGE = Path(__file__).resolve().parent / "settings.rst"
PROXY_PAGE = PAGE.with_name("proxy-settings.rst")

# The field that begins a section, and the section's title.
_SECTIONS = {
    "port": "Server and logging",
    "pg_host": "PostgreSQL",
    "pop_timeout_ms": "Pops and long polls",
    "zstd_level": "Writing and reading",
    "hotlist": "Candidates for pops",
    "sync_enabled": "Mesh and sibling workers",
    "jwt_enabled": "Authentication and tenants",
    "encryption_key": "Encryption at rest",
    "file_buffer_dir": "Spool",
}

_PROXY_SECTIONS = {
    "port": "Listener and logging",
    "pxdb_host": "The proxy's database",
    "enforce": "The gateway",
    "jwt_secret": "People",
    "meter_flush_ms": "Usage",
    "dev_insecure": "Development without a database",
}

_PROXY_HEAD = """\
Settings of the proxy
=====================

The proxy reads these environment variables once, when it starts. This page is made from
``queen/proxy/settings.py`` by ``docs/generate_settings.py``; a test fails when it is out of date.

- Only ``true`` is true; anything else that is set is false.
- A number that can't be read gives the default, one below its bound the bound.
- A variable that is set to nothing is unset, but for ``QUEEN_PROXY_BIND_ADDR``, where that ends the start.
- Names that end in ``_MS`` are in milliseconds.
"""

_HEAD = """\
Settings
========

The broker reads these environment variables once, when it starts. This page is made from
``queen/settings.py`` by ``docs/generate_settings.py``; a test fails when it is out of date.

- Where several names are given, the first one that is set and not empty counts.
- A boolean is ``true``/``false``, ``1``/``0``, ``yes``/``no`` or ``on``/``off`` in any case. Anything else
  ends the start with a message, and so does ``QUEEN_BIND_ADDR`` with a port in it.
- A number that can't be read gives the default and a warning in the log; with ``QUEEN_STRICT_BOOT`` it ends the
  start. A number outside its bounds becomes the nearest bound.
- Names that end in ``_MS`` are in milliseconds, in ``_MB`` in megabytes.

What gunicorn itself reads is in `Run a broker <run-a-broker.rst>`_.
"""


def page() -> str:
    """The page as it should be."""
    return "\n".join([_HEAD, *_body(Settings, _SECTIONS)])


def proxy_page() -> str:
    """The proxy's page as it should be."""
    return "\n".join([_PROXY_HEAD, *_body(ProxySettings, _PROXY_SECTIONS)])


def _body(kind: type[Any], sections: dict[str, str]) -> Iterator[str]:
    for setting in fields(kind):
        variable: Variable | None = setting.metadata.get("variable")
        if variable is None:
            continue
        if title := sections.get(setting.name):
            yield f"\n{title}\n{'-' * len(title)}\n"
            yield ".. list-table::\n   :header-rows: 1\n"
            yield "   * - Variable\n     - Default\n     - Bounds\n     - Meaning"
        yield from _row(setting, variable)
    yield ""


def _row(setting: Field[Any], variable: Variable) -> Iterator[str]:
    yield "   * - " + ", ".join(f"``{name}``" for name in variable.names)
    yield f"     - {_literal(setting.default)}"
    yield f"     - {_bounds(variable)}"
    yield f"     - {variable.about[0].upper()}{variable.about[1:]}."


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        value = str(value).lower()
    return f"``{value}``" if value != "" else "empty"


def _bounds(variable: Variable) -> str:
    if variable.kind == "bool":
        return "boolean"
    if variable.maximum is not None:
        return f"{variable.minimum:g} to {variable.maximum:g}"
    return "" if variable.minimum is None else f"{variable.minimum:g} or more"


if __name__ == "__main__":
    PAGE.write_text(page())
    PROXY_PAGE.write_text(proxy_page())
