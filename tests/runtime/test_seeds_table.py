"""The table of what the seed documents say names tests that exist, and leaves no statement without an answer."""

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

PAGE = ROOT / "docs" / "seeds.md"
COLUMNS = ["statement", "what anyaccel does", "shown by"]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
OTHER_ANSWERS = ("not measurable here: ", "planned: ", "not done: ", "nothing to do: ")


def read_tables() -> dict[str, list[list[str]]]:
    """The rows of each section's table, by the section's title."""
    tables: dict[str, list[list[str]]] = {}
    title = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            title = line.removeprefix("## ")
        elif line.startswith("|"):
            cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            tables.setdefault(title, []).append(cells)
    return tables


TABLES = read_tables()
ROWS = [(title, *row) for title, rows in TABLES.items() for row in rows[2:]]
NAMED = sorted({found for *_, shown_by in ROWS for found in TEST.findall(shown_by)})


@functools.cache
def read_tests(path: Path) -> frozenset[str]:
    """The names of the tests in a file, those of a class too; none where there is no such file."""
    tree = ast.parse(path.read_text() if path.is_file() else "")
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


def test_there_is_one_table_for_each_document() -> None:
    assert len(TABLES) == 3
    for rows in TABLES.values():
        assert rows[0] == COLUMNS
        assert len(rows) > 10


def is_answered(row: tuple[str, ...]) -> bool:
    """Whether each column is filled, and the last names a test or says why there is none."""
    return len(row) == 1 + len(COLUMNS) and all(row) and bool(TEST.search(row[-1]) or row[-1].startswith(OTHER_ANSWERS))


def test_every_statement_has_an_answer() -> None:
    assert [row for row in ROWS if not is_answered(row)] == []


@pytest.mark.parametrize("row", [("t", "s", "a"), ("t", "s", "", "planned: x"), ("t", "s", "a", "tests/a.py")])
def test_the_check_finds_a_statement_without_an_answer(row: tuple[str, ...]) -> None:
    assert not is_answered(row)


def test_the_tests_that_are_named_exist() -> None:
    missing = [f"{file}::{name}" for file, name in NAMED if name not in read_tests(ROOT / file)]
    assert missing == []


def test_every_mention_of_a_test_is_read() -> None:
    """A misspelled mention would be skipped in silence."""
    mentions = sum(shown_by.count("::") for *_, shown_by in ROWS)
    assert mentions == sum(len(TEST.findall(shown_by)) for *_, shown_by in ROWS)


def test_the_page_for_agents_names_what_stands_in_for_a_type() -> None:
    """The review of the pull request asks for it twice."""
    assert "`anyaccel.adjust_dtype(dtype, device)`" in (ROOT / "AGENTS.md").read_text()
