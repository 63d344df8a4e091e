"""The tables of docs/seeds.md: every statement has an answer, and the tests that they name exist."""

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
    """Return the rows of each section's table, by section title."""
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
NAMED = sorted({test for *_, shown_by in ROWS for test in TEST.findall(shown_by)})


@functools.cache
def read_tests(path: Path) -> frozenset[str]:
    """Return the names of the tests in a file, including those in classes; empty if the file does not exist."""
    tree = ast.parse(path.read_text() if path.is_file() else "")
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


def test_there_is_one_table_per_document() -> None:
    assert len(TABLES) == 3
    for rows in TABLES.values():
        assert rows[0] == COLUMNS
        assert len(rows) > 10


def is_answered(row: tuple[str, ...]) -> bool:
    """Return whether all columns have text, and the last one names a test or gives a reason."""
    return len(row) == 1 + len(COLUMNS) and all(row) and bool(TEST.search(row[-1]) or row[-1].startswith(OTHER_ANSWERS))


def test_every_statement_has_an_answer() -> None:
    assert [row for row in ROWS if not is_answered(row)] == []


@pytest.mark.parametrize("row", [("t", "s", "a"), ("t", "s", "", "planned: x"), ("t", "s", "a", "tests/a.py")])
def test_the_check_rejects_a_statement_without_an_answer(row: tuple[str, ...]) -> None:
    assert not is_answered(row)


def test_named_tests_exist() -> None:
    missing = [f"{file}::{name}" for file, name in NAMED if name not in read_tests(ROOT / file)]
    assert missing == []


def test_every_test_reference_is_parsed() -> None:
    """A misspelled reference would be skipped silently."""
    mentions = sum(shown_by.count("::") for *_, shown_by in ROWS)
    assert mentions == sum(len(TEST.findall(shown_by)) for *_, shown_by in ROWS)


def test_agents_page_names_adjust_dtype() -> None:
    """The review of the pull request asks for it twice."""
    assert "`anyaccel.adjust_dtype(dtype, device)`" in (ROOT / "AGENTS.md").read_text()
