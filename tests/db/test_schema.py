"""The splitter of SQL scripts: every statement once, whole, and in order."""

from __future__ import annotations

from importlib import resources

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queen.db.schema import statements

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

# Pieces of a statement: words, and all that may hide a semicolon or look like the start of what does.
hidden = st.text("ab;'\"$-/* \n", max_size=12)
words = st.sampled_from(["SELECT", "1", "a.b", "x - y", "a / b", "(c)", "$1", "a*b", ",", "AS", "CREATE", "é"])
quoted = hidden.map(lambda text: "'" + text.replace("'", "''") + "'")
names = hidden.map(lambda text: '"' + text.replace('"', '""') + '"')
bodies = st.builds(
    lambda tag, text: f"${tag}${text.replace('$', '')}${tag}$", st.sampled_from(["", "a", "body_1"]), hidden
)
nested = hidden.map(lambda text: f"$a$ x $b$;{text.replace('$', '')}$b$; $c$ y $a$")
line_comments = hidden.map(lambda text: "-- " + text.replace("\n", " ") + "\n")
block_comments = hidden.map(lambda text: "/* " + text.replace("*", " ").replace("/", " ") + " */")
pieces = words | quoted | names | bodies | nested | line_comments | block_comments
blanks = st.text(" \n\t", max_size=3)


@st.composite
def statement(draw: st.DrawFn) -> str:
    comment = draw(st.just("") | line_comments)
    body = " ".join(["SELECT", *draw(st.lists(pieces, max_size=6))])
    return f"{comment}{body}"


@given(st.lists(statement(), max_size=5), blanks, st.booleans(), st.just("") | line_comments)
def test_a_script_splits_into_its_statements(parts: list[str], blank: str, ended: bool, trailer: str) -> None:
    # A line comment must end before the semicolon does its work.
    script = blank + "".join(f"{part}\n;{blank}" for part in parts)
    if parts and not ended:
        script = script.rstrip().removesuffix(";")
    assert list(statements(script + "\n" + trailer if ended else script)) == [part.strip() for part in parts]


@pytest.mark.parametrize(
    "script", ["", " \n", ";", ";;\n;", "-- nothing\n", "-- a;\n-- b\n;", "\n-- ends without a line"]
)
def test_nothing_is_no_statement(script: str) -> None:
    assert list(statements(script)) == []


def test_leading_comments_stay_with_their_statement() -> None:
    script = "-- one;\n-- two\nSELECT 1;\n\n-- three\nSELECT 2"
    assert list(statements(script)) == ["-- one;\n-- two\nSELECT 1", "-- three\nSELECT 2"]


def test_a_drop_runs_with_what_follows_it() -> None:
    script = "SELECT 1; DROP FUNCTION f(int);\n-- again\nCREATE FUNCTION f(int) AS $$ ; $$; SELECT 2;"
    first, both, last = statements(script)
    assert (first, last) == ("SELECT 1", "SELECT 2")
    assert both == "DROP FUNCTION f(int);\n-- again\nCREATE FUNCTION f(int) AS $$ ; $$"


def test_several_drops_run_with_what_follows_them() -> None:
    script = "-- old\nDROP TABLE a; drop table b; CREATE TABLE c (); SELECT 1"
    assert list(statements(script)) == ["-- old\nDROP TABLE a;\ndrop table b;\nCREATE TABLE c ()", "SELECT 1"]


def test_a_drop_at_the_end_runs_alone() -> None:
    assert list(statements("SELECT 1; DROP TABLE a;")) == ["SELECT 1", "DROP TABLE a"]


def test_every_statement_of_the_schema_ends_where_it_should() -> None:
    """No statement holds the beginning of another one."""
    starts = ("CREATE ", "ALTER ", "DROP ", "INSERT ", "DO ", "COMMENT ", "UPDATE ", "GRANT ", "SET ")
    folder = resources.files("queen.db") / "sql"
    for file in folder.iterdir():
        script = file.read_text("utf-8")
        parts = list(statements(script))
        begun = [line.rstrip(";") for line in script.splitlines() if line.startswith(starts)]
        found = [line.rstrip(";") for part in parts for line in part.splitlines() if line.startswith(starts)]
        assert found == begun, file.name
        for part in parts:
            own = [line for line in part.splitlines() if line.startswith(starts) and not line.startswith("DROP ")]
            assert len(own) <= 1, f"{file.name}: {own}"
