"""The pages tell the truth: their examples run as printed, and what they name exists.

An example is a block of shell with one `curl` and after it the line "Answer (<status>)" with the answer. Those
of a page run in its order, against a broker of their own. Ids and times differ from the printed ones, so the
first answer that shows a printed id tells what it stands for from there on.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from configparser import ConfigParser
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from queen.proxy.settings import ProxySettings
from queen.settings import Settings
from tests.broker import ROOT, Broker
from tests.compat.environments import python_of

README = ROOT / "README.rst"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.glob("*.rst"))]
WITH_EXAMPLES = [page for page in PAGES if "curl" in page.read_text()]

ADDRESS = "http://127.0.0.1:6632"
CLIENT = "1.3.0"
MORE = "..."  # as a key of a printed object: it has others too

_BLOCK = re.compile(r"^\.\. code-block:: (\w+)\n\n((?:(?:   .*)?\n)+)", re.MULTILINE)
_ANSWER = re.compile(r"Answer \((\d{3})\)(:|, without a body\.)\n")
_PATH = re.compile(r"(?<![\w/.~-])(?:queen|conf|scripts|docs|tests|bench)/[\w./-]*\w")
_LINK = re.compile(r"`[^`<]+<([^`>]+)>`_")
_VARIABLE = re.compile(r"\b(?:PG|QUEEN|DB|POP|DEFAULT|LOG|WEB|GUNICORN|FILE|JWT)_[A-Z][A-Z0-9_]*[A-Z0-9]\b")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_TIME = re.compile(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z")
_VERSION = re.compile(r"\d+\.\d+\.\d+")


@dataclass(frozen=True)
class Example:
    """A command with the answer that the page prints; None stands for no body."""

    line: int
    command: str
    status: int
    answer: Any


def _blocks(text: str) -> Iterator[tuple[int, int, str, str]]:
    """Yield where each code block starts and ends, its language and its text."""
    for match in _BLOCK.finditer(text):
        code = "\n".join(line.removeprefix("   ") for line in match[2].splitlines())
        yield match.start(), match.end(), match[1], code.strip()


def _load(text: str | bytes) -> Any:
    """Return decoded JSON with the spelling of its fractions."""
    return json.loads(text, parse_float=str)


def _examples(page: Path) -> Iterator[Example]:
    text = page.read_text()
    blocks = list(_blocks(text))
    for start, end, language, code in blocks:
        if language != "shell" or "curl" not in code:
            continue
        line = text.count("\n", 0, start) + 3
        answer = _ANSWER.match(text, end)
        assert answer, f"{page.name}:{line}: no answer after the command"
        printed = None
        if answer[2] == ":":
            following = next(block for block in blocks if block[0] > end)
            assert following[0] == answer.end() + 1 and following[2] == "json", f"{page.name}:{line}: no JSON follows"
            printed = _load(following[3])
        yield Example(line, code, int(answer[1]), printed)


class Reader:
    """Somebody who follows a page, putting the ids of their own answers in place of the printed ones."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._ids: dict[str, str] = {}

    def run(self, command: str) -> tuple[int, Any]:
        """Send what a `curl` command sends; return the status and the decoded body."""
        words = shlex.split(_UUID.sub(lambda m: self._ids.get(m[0], m[0]), command.replace("\\\n", " ")))
        assert words[:2] == ["curl", "-s"]
        method, body, headers = None, None, {}
        for option, value in pairwise(words):
            if option == "-X":
                method = value
            elif option == "-d":
                body = value.encode()
            elif option == "-H":
                name, _, text = value.partition(": ")
                headers[name] = text
        (url,) = (word for word in words if word.startswith("http://"))
        assert url.startswith(ADDRESS), f"{url} isn't the broker's address"
        response = self._broker.request(method or "GET", url.removeprefix(ADDRESS), body, headers)
        return response.status, _load(response.body) if response.body else None

    def compare(self, printed: Any, got: Any, path: str = "answer") -> None:
        """Check that an answer is the printed one, but for ids, times and the version."""
        if isinstance(printed, dict):
            assert isinstance(got, dict), f"{path}: {got!r}"
            expected = [key for key in printed if key != MORE]
            seen = [key for key in got if key in printed] if MORE in printed else list(got)
            assert sorted(seen) == sorted(expected), f"{path} has the keys {list(got)}"
            for key in expected:
                self.compare(printed[key], got[key], f"{path}.{key}")
        elif isinstance(printed, list):
            assert isinstance(got, list) and len(got) == len(printed), f"{path}: {got!r}"
            for number, (one, other) in enumerate(zip(printed, got, strict=True)):
                self.compare(one, other, f"{path}[{number}]")
        elif isinstance(printed, str) and _UUID.fullmatch(printed):
            assert isinstance(got, str) and _UUID.fullmatch(got), f"{path}: {got!r}"
            assert self._ids.setdefault(printed, got) == got, f"{path}: the page shows this id elsewhere for another"
        elif isinstance(printed, str) and (form := next((p for p in (_TIME, _VERSION) if p.fullmatch(printed)), None)):
            assert isinstance(got, str) and form.fullmatch(got), f"{path}: {got!r}"
        else:
            assert got == printed, path


def _name(page: Path) -> str:
    return page.stem


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=_name)
def test_examples_are_answered_as_printed(page: Path, broker: Broker) -> None:
    reader = Reader(broker)
    examples = list(_examples(page))
    assert examples
    for example in examples:
        where = f"{page.name}:{example.line}"
        status, answer = reader.run(example.command)
        assert status == example.status, f"{where}: {status} {answer}"
        reader.compare(example.answer, answer, where)


def test_client_example_works_as_printed(broker: Broker) -> None:
    text = README.read_text()
    assert f"queen-mq=={CLIENT}" in text
    (code,) = (code for _, _, language, code in _blocks(text) if language == "python")
    done = subprocess.run(
        [python_of(CLIENT), "-I", "-c", code.replace(ADDRESS, broker.url)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "sending to user-7@example.org" in done.stdout


def test_settings_page_is_current() -> None:
    script = runpy.run_path(str(DOCS / "generate_settings.py"))
    assert script["PAGE"].read_text() == script["page"](), "run docs/generate_settings.py"
    assert script["PROXY_PAGE"].read_text() == script["proxy_page"](), "run docs/generate_settings.py"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_named_paths_exist(page: Path) -> None:
    text = page.read_text()
    missing = [path for path in set(_PATH.findall(text)) if not (ROOT / path).exists()]
    missing += [link for link in _LINK.findall(text) if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_named_variables_exist(page: Path) -> None:
    settings = [setting for kind in (Settings, ProxySettings) for setting in fields(kind) if setting.metadata]
    known = {name for setting in settings for name in setting.metadata["variable"].names}
    known |= {"WEB_CONCURRENCY", "GUNICORN_CMD_ARGS"}  # gunicorn's own
    known |= {"QUEEN_BROKERS", "QUEEN_TOKEN"}  # of scripts/maintenance
    assert set(_VARIABLE.findall(page.read_text())) <= known


def test_index_links_every_page() -> None:
    links = set(_LINK.findall((DOCS / "index.rst").read_text()))
    assert {page.name for page in DOCS.glob("*.rst")} - {"index.rst"} <= links


def test_queue_options_are_all_explained(broker: Broker) -> None:
    options = broker.request("POST", "/api/v1/configure", {"queue": "q"}).json()["options"]
    page = (DOCS / "queue-options.rst").read_text()
    assert [option for option in options if f"``{option}``" not in page] == []
    # A row of the table is the option, its default, its meaning; commas join two options.
    rows = re.findall(r"^``(\w+)`` +(\d+|true|false) ", page, re.MULTILINE)
    assert len(rows) > 5
    assert {name: json.loads(default) for name, default in rows} == {name: options[name] for name, _ in rows}


def test_dependencies_have_their_reasons() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    declared = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    names = {re.split(r"[\[>=;<]", line)[0] for text in declared for line in text.split("\n") if line}
    reasons = dict(re.findall(r"^``([\w.-]+)`` +(\S.*)$", README.read_text(), re.MULTILINE))
    assert sorted(names - set(reasons)) == []
