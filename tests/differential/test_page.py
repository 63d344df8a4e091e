"""docs/compatibility.md agrees with the usages and the stored results."""

from __future__ import annotations

from tests.conftest import NEEDS_RECIPES
from tests.differential.page import PATH, make_page, read_results
from tests.differential.session import USAGES

pytestmark = NEEDS_RECIPES


def test_the_page_is_up_to_date() -> None:
    assert PATH.read_text() == make_page(), "run: python -m tests.differential --write-docs"


def test_every_usage_is_on_the_page() -> None:
    text = PATH.read_text()
    assert [name for name in USAGES if f'id="{name}"' not in text] == []


def test_every_usage_was_run_on_the_cpu_and_no_result_is_unexplained() -> None:
    results = read_results()
    assert [name for name in USAGES if (name, "cpu") not in results and "cpu" not in USAGES[name].skip] == []
    assert [key for key, row in results.items() if row["status"] == "different"] == []
