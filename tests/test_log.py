"""Logs: every event is one line, in either form, whatever it says."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queen import log
from queen.log import Log

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z ( INFO| WARN|ERROR|DEBUG) ([\w.-]+): (.*)")
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")

texts = st.text(max_size=50)
values = texts | st.integers() | st.floats() | st.booleans() | st.none() | st.binary(max_size=20) | st.lists(texts)
names = st.from_regex(r"[a-z]{3,8}_[a-z_]{1,8}", fullmatch=True)


class Lines:
    """Everything that is logged, as a reader of lines sees it."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def configure(self, level: str = "info", json: bool = False) -> None:
        log.configure(level, json)

    def read(self) -> list[str]:
        return self._capsys.readouterr().err.splitlines()


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Iterator[Lines]:
    """What a test logs once it has configured the logs; in the end they are as they were before."""
    root, broker = logging.getLogger(), logging.getLogger("queen")
    handlers, level = list(root.handlers), broker.level
    yield Lines(capsys)
    root.handlers = handlers
    broker.setLevel(level)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("queen."):
            logging.getLogger(name).setLevel(logging.NOTSET)


def formatted(as_json: bool, message: str, fields: dict[str, Any], error: BaseException | None = None) -> str:
    """One event through the formatter of either form."""
    formatter = log._JsonLine() if as_json else log._Line()
    trouble = (type(error), error, None) if error is not None else None
    record = logging.LogRecord("queen.test", logging.INFO, "", 0, message, None, trouble)
    record.fields = fields
    return formatter.format(record)


@given(texts, st.dictionaries(names, values, max_size=5), st.none() | texts.map(ValueError), st.booleans())
def test_an_event_is_one_line(message: str, fields: dict[str, Any], error: Exception | None, as_json: bool) -> None:
    line = formatted(as_json, message, fields, error)
    assert len(line.splitlines()) == 1
    assert not UNPRINTABLE.search(line)


@given(texts, st.dictionaries(names, values, max_size=5))
def test_a_json_event_is_one_flat_object(message: str, fields: dict[str, Any]) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    event = json.loads(formatted(True, message, fields), parse_constant=refuse)
    assert list(event) == ["timestamp", "level", "message", *fields, "target"]
    assert (event["level"], event["message"], event["target"]) == ("INFO", message, "test")
    for name, value in fields.items():
        if isinstance(value, str | int | list | None):
            assert event[name] == value


@given(st.dictionaries(names, texts, max_size=5))
def test_fields_can_be_read_back(fields: dict[str, str]) -> None:
    rest = formatted(False, "said", fields).partition("said")[2]
    for name, value in fields.items():
        assert rest.startswith(f" {name}=")
        rest = rest[len(name) + 2 :]
        if rest.startswith('"'):
            found, length = json.JSONDecoder().raw_decode(rest)
            rest = rest[length:]
        else:
            found = rest.partition(" ")[0]
            rest = rest[len(found) :]
        assert found == value
    assert rest == ""


def test_a_line_has_time_level_target_message_and_fields(lines: Lines) -> None:
    lines.configure()
    Log("boot").info("listening", port=6632, ready=True, late=False, note="two words", nothing="", none=None)
    (line,) = lines.read()
    match = LINE.fullmatch(line)
    assert match
    assert match.groups() == (
        " INFO",
        "boot",
        'listening port=6632 ready=true late=false note="two words" nothing="" none=None',
    )


@pytest.mark.parametrize("as_json", [False, True])
def test_an_exception_is_one_line_with_its_traceback(lines: Lines, as_json: bool) -> None:
    lines.configure(json=as_json)
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        Log("http").exception("request failed", path="/a b")
    (line,) = lines.read()
    for part in ("request failed", "/a b", "Traceback", "first", "second", "test_log.py"):
        assert part in line


def test_what_libraries_warn_of_has_the_same_form(lines: Lines) -> None:
    lines.configure()
    logging.getLogger("psycopg.pool").warning("error connecting:\n%s", "no route")
    (line,) = lines.read()
    match = LINE.fullmatch(line)
    assert match
    assert match[3] == r"error connecting:\nno route"


def test_levels_hide_what_is_below(lines: Lines) -> None:
    noise = Log("noise")
    for level, expected in (("debug", 4), ("info", 3), ("warn", 2), ("error", 1), ("nonsense", 3)):
        lines.configure(level)
        noise.debug("d"), noise.info("i"), noise.warning("w"), noise.error("e")
        assert (level, len(lines.read())) == (level, expected)


@pytest.mark.parametrize("level", ["warn,fusion=debug", " warn , fusion = debug ", "warn,queen::fusion=debug"])
def test_a_target_may_have_a_level_of_its_own(lines: Lines, level: str) -> None:
    lines.configure(level)
    Log("pop").info("hidden")
    Log("fusion").debug("shown")
    assert ["shown" in line for line in lines.read()] == [True]


def test_what_repeats_is_said_once_and_then_counted(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    lines.configure()
    now = 100.0
    monkeypatch.setattr(log.time, "monotonic", lambda: now)
    often = Log("often")
    for _ in range(5):
        often.sampled(10, "trouble", n=1)
    often.sampled(10, "other trouble")
    assert [line.partition("often: ")[2] for line in lines.read()] == ["trouble n=1", "other trouble"]
    now += 11
    often.sampled(10, "trouble", n=2)
    often.sampled(10, "trouble", n=3)
    assert [line.partition("often: ")[2] for line in lines.read()] == ["trouble n=2 suppressed=4"]
