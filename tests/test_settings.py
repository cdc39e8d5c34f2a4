"""Settings: what each kind of variable takes, what it falls back to, and what refuses to boot."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queen.configuration import blocks
from queen.settings import Settings, SettingsError, Variable, parse_boolean

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

VARIABLES: dict[str, tuple[Variable, Any]] = {
    field.name: (field.metadata["variable"], field.default) for field in fields(Settings) if field.metadata
}
NUMBERS = [name for name, (variable, _) in VARIABLES.items() if variable.kind in ("int", "float")]
CLAMPED = [name for name in NUMBERS if VARIABLES[name][0].clamp]
BOOLEANS = [name for name, (variable, _) in VARIABLES.items() if variable.kind == "bool"]
# What an environment can hold: no NUL.
texts = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=30)


def read(**environ: str) -> Settings:
    return Settings.read(environ)


def variable_of(name: str) -> str:
    return VARIABLES[name][0].names[0]


def test_an_empty_environment_gives_the_defaults() -> None:
    result = read()
    for name, (_, default) in VARIABLES.items():
        assert name in ("server_id", "mesh_bind_addr") or getattr(result, name) == default
    assert result.server_id == socket.gethostname()
    assert result.mesh_bind_addr == result.bind_addr
    assert result.warnings == ()
    assert (result.port, result.max_body_bytes, result.pool_size) == (6632, 67_108_864, 160)


def test_every_variable_says_what_it_is_for() -> None:
    names = [name for variable, _ in VARIABLES.values() for name in variable.names]
    assert len(names) == len(set(names))
    assert all(variable.about for variable, _ in VARIABLES.values())


# Booleans


@pytest.mark.parametrize("name", BOOLEANS)
@pytest.mark.parametrize("word", ["true", "1", "yes", "on", "false", "0", "no", "off"])
def test_a_boolean_is_one_of_eight_words(name: str, word: str) -> None:
    for text in (word, word.upper(), word.capitalize(), f"  {word}\t"):
        # Three need another setting.
        needed = {"JWT_SECRET": "x", "QUEEN_KV_TRUSTED_PROXY": "1", "QUEEN_SYNC_SECRET": "x"}
        assert getattr(read(**{**needed, variable_of(name): text}), name) is (word in ("true", "1", "yes", "on"))


@pytest.mark.parametrize("name", BOOLEANS)
@pytest.mark.parametrize("text", ["", " ", "\t\n"])
def test_a_blank_boolean_is_the_default(name: str, text: str) -> None:
    assert getattr(read(**{variable_of(name): text}), name) is VARIABLES[name][1]


@given(st.sampled_from(BOOLEANS), texts)
def test_any_other_boolean_refuses_to_boot(name: str, text: str) -> None:
    variable = variable_of(name)
    if text.strip().lower() in ("", "true", "1", "yes", "on", "false", "0", "no", "off"):
        read(**{variable: text})
        return
    with pytest.raises(SettingsError) as error:
        read(**{variable: text})
    assert str(error.value) == f'{variable}="{text}" is not a boolean (expected true/false, 1/0, yes/no, on/off)'


def test_a_boolean_is_parsed_alike_elsewhere() -> None:
    assert parse_boolean("X", " On ") is True
    with pytest.raises(SettingsError, match='X="maybe" is not a boolean'):
        parse_boolean("X", "maybe")


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(SettingsError) as error:
        read(QUEEN_HOTLIST="a", QUEEN_LOG_JSON="b", QUEEN_BIND_ADDR="127.0.0.1:80")
    for part in ('QUEEN_HOTLIST="a"', 'QUEEN_LOG_JSON="b"', 'QUEEN_BIND_ADDR="127.0.0.1:80"'):
        assert part in str(error.value)


# Numbers


@given(st.sampled_from(NUMBERS), texts | st.text("0123456789+-.eE_xinfa ", max_size=12))
def test_any_text_gives_a_number_within_bounds(name: str, text: str) -> None:
    variable, default = VARIABLES[name]
    result = read(**{variable.names[0]: text})
    value = getattr(result, name)
    assert type(value) is type(default)
    assert math.isfinite(value)
    assert variable.minimum is None or value >= variable.minimum
    assert variable.maximum is None or value <= variable.maximum
    if result.warnings:
        assert value == default
        assert result.warnings == (f'{variable.names[0]}="{text}" is not a number; using {default}',)


@given(st.sampled_from(CLAMPED), st.integers(-(2**40), 2**40))
def test_a_number_is_taken_and_clamped(name: str, number: int) -> None:
    variable, _ = VARIABLES[name]
    low = -math.inf if variable.minimum is None else variable.minimum
    high = math.inf if variable.maximum is None else variable.maximum
    result = read(**{variable.names[0]: str(number)})
    assert (getattr(result, name), result.warnings) == (min(max(number, low), high), ())


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        " 5",
        "5 ",
        "5\n",
        "1_000",
        "x",
        "0x10",
        "\u0665",
        "\uff15",
        "nan",
        "inf",
        "-inf",
        "1e400",
        "9" * 30,
        "9" * 5000,
    ],
)
def test_what_is_no_number_is_the_default_with_a_warning(name: str, text: str) -> None:
    variable, default = VARIABLES[name]
    result = read(**{variable.names[0]: text})
    assert getattr(result, name) == default
    if text == "" and len(variable.names) > 1:
        assert result.warnings == ()  # an empty variable gives way to its other name
        return
    assert len(result.warnings) == 1
    with pytest.raises(SettingsError) as error:
        read(**{variable.names[0]: text, "QUEEN_STRICT_BOOT": "true"})
    assert str(error.value) == result.warnings[0]


# Strings and names


def test_an_empty_string_is_a_string() -> None:
    assert read(PG_PASSWORD="").pg_password == ""
    assert read(PG_USER=" ").pg_user == " "


@pytest.mark.parametrize(
    "name, first, second",
    [
        ("log_level", "RUST_LOG", "LOG_LEVEL"),
        ("server_id", "QUEEN_SERVER_ID", "HOSTNAME"),
        ("pg_database", "PG_DATABASE", "PG_DB"),
    ],
)
def test_the_first_name_that_is_not_empty_counts(name: str, first: str, second: str) -> None:
    assert getattr(read(**{first: "a", second: "b"}), name) == "a"
    assert getattr(read(**{first: "", second: "b"}), name) == "b"
    assert getattr(read(**{second: "b"}), name) == "b"


def test_the_wait_of_a_pop_has_two_names() -> None:
    assert read(DEFAULT_TIMEOUT="5", POP_DEFAULT_TIMEOUT_MS="6").pop_timeout_ms == 5
    assert read(POP_DEFAULT_TIMEOUT_MS="6").pop_timeout_ms == 6


@pytest.mark.parametrize("text", ["new", "new-only", "new_only", "newonly"])
def test_a_subscription_is_new_when_it_says_so(text: str) -> None:
    assert read(DEFAULT_SUBSCRIPTION_MODE=text).subscription_mode == "new"


@pytest.mark.parametrize("text", ["all", "", "NEW", "earliest"])
def test_any_other_subscription_is_all(text: str) -> None:
    assert read(DEFAULT_SUBSCRIPTION_MODE=text).subscription_mode == "all"


@pytest.mark.parametrize("text", ["", " ", "127.0.0.1:6632", "localhost:1", ":80"])
def test_an_address_with_a_port_or_none_refuses_to_boot(text: str) -> None:
    with pytest.raises(SettingsError, match="QUEEN_BIND_ADDR"):
        read(QUEEN_BIND_ADDR=text)


@pytest.mark.parametrize("text", ["0.0.0.0", "localhost", "::", "[::1]", "2001:db8::1"])
def test_an_address_is_a_host(text: str) -> None:
    assert read(QUEEN_BIND_ADDR=text).bind_addr == text


def test_other_variables_are_ignored() -> None:
    assert read(QUEEN_NOTHING="x", PATH="/") == read()


# The boot


def test_a_broker_does_not_boot_on_a_setting_it_cannot_use() -> None:
    environ = {**os.environ, "QUEEN_HOTLIST": "maybe"}
    command = [sys.executable, "-c", "import queen.wsgi"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert line.endswith(
        'ERROR boot: FATAL: QUEEN_HOTLIST="maybe" is not a boolean (expected true/false, 1/0, yes/no, on/off)'
    )


# The mesh


@pytest.mark.parametrize("port", ["0", "-1", "65536", "70000"])
def test_a_mesh_port_out_of_bounds_is_the_default_and_warned_of(port: str) -> None:
    result = read(QUEEN_MESH_PORT=port)
    assert result.mesh_port == 6633
    assert result.warnings == (f'QUEEN_MESH_PORT="{port}" is not between 1 and 65535; using 6633',)


@pytest.mark.parametrize(
    ("environ", "port"),
    [
        ({"QUEEN_UDP_NOTIFY_PORT": "7000"}, 7000),
        ({"QUEEN_MESH_PORT": "", "QUEEN_UDP_NOTIFY_PORT": "7000"}, 7000),
        ({"QUEEN_MESH_PORT": "abc", "QUEEN_UDP_NOTIFY_PORT": "7000"}, 7000),
        ({"QUEEN_MESH_PORT": "7001", "QUEEN_UDP_NOTIFY_PORT": "7000"}, 7001),
        ({"QUEEN_MESH_PORT": "abc", "QUEEN_UDP_NOTIFY_PORT": "def"}, 6633),
    ],
)
def test_the_mesh_port_has_an_older_name_for_when_it_is_no_number(environ: dict[str, str], port: int) -> None:
    assert read(**environ).mesh_port == port


def test_the_peers_have_an_older_name_for_when_they_are_empty() -> None:
    assert read(QUEEN_UDP_PEERS="a,b").mesh_peers == "a,b"
    assert read(QUEEN_MESH_PEERS="", QUEEN_UDP_PEERS="a,b").mesh_peers == "a,b"
    assert read(QUEEN_MESH_PEERS="c", QUEEN_UDP_PEERS="a,b").mesh_peers == "c"


def test_the_mesh_binds_where_http_does_unless_told_otherwise() -> None:
    assert read(QUEEN_BIND_ADDR="10.0.0.1").mesh_bind_addr == "10.0.0.1"
    assert read(QUEEN_BIND_ADDR="10.0.0.1", QUEEN_MESH_BIND_ADDR="10.1.0.1").mesh_bind_addr == "10.1.0.1"
    with pytest.raises(SettingsError, match=r'QUEEN_MESH_BIND_ADDR="10\.1\.0\.1:6633" must be a host without a port'):
        read(QUEEN_MESH_BIND_ADDR="10.1.0.1:6633")


@pytest.mark.parametrize(
    "environ",
    [
        {"QUEEN_MESH_REPLAY_GUARD": "Refuse"},
        {"QUEEN_MESH_ALLOW": "some"},
        {"QUEEN_MESH_ALLOW": "10.0.0.0/8,10.0.0.0/99"},
        {"QUEEN_MESH_ALLOW": ", ,"},
        {"QUEEN_MESH_STRICT": "true"},
        {"QUEEN_MESH_ALLOWED_IDS": ","},
        {"QUEEN_MESH_STRICT": "true", "QUEEN_SYNC_SECRET": "x", "QUEEN_MESH_NAMES": " , "},
        {"QUEEN_MESH_TLS_CERT": "/cert.pem"},
        {"QUEEN_MESH_TLS_KEY": "/key.pem", "QUEEN_MESH_TLS_CA": "/ca.pem"},
    ],
)
def test_what_would_leave_the_mesh_more_open_than_meant_refuses_to_boot(environ: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="QUEEN_MESH_"):
        read(**environ)


@pytest.mark.parametrize("allow", ["any", "peers", "10.0.0.0/8", "10.1.2.3, fd00::/8", "10.1.2.3/8"])
def test_the_allow_list_is_a_word_or_networks(allow: str) -> None:
    assert read(QUEEN_MESH_ALLOW=allow).mesh_allow == allow


def test_a_broker_is_among_the_ids_it_allows() -> None:
    assert read(QUEEN_MESH_ALLOWED_IDS="b, c", QUEEN_SERVER_ID="a").allowed_ids() == ["b", "c", "a"]
    assert read(QUEEN_SERVER_ID="a").allowed_ids() == []


def test_every_setting_is_in_one_block_of_the_boot_log_and_no_secret_is() -> None:
    secrets = {s.name: s.name.upper() for s in fields(Settings) if s.metadata and s.metadata["variable"].secret}
    assert len(secrets) > 2
    settings = replace(Settings(), **secrets)
    printed = dict(blocks(settings, version="1"))
    shown = [key for values in printed.values() for key in values]
    assert len(shown) == len([s for s in fields(Settings) if s.metadata]) + 2  # and version, and auth
    assert "" not in printed
    for name, secret in secrets.items():
        assert secret not in str(printed), name
    assert printed["postgres"]["password"] == "<set:11 chars>"
