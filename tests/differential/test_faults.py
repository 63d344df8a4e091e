"""Every fault of the review has a test, or says what is not tested."""

from __future__ import annotations

import ast

import pytest

import tests.differential.usages  # noqa: F401 - registers the usages
from tests.conftest import NEEDS_RECIPES, ROOT
from tests.differential.faults import FAULTS, Fault
from tests.differential.session import USAGES

pytestmark = NEEDS_RECIPES


def test_the_list_is_complete() -> None:
    assert len(FAULTS) == 27
    assert [fault.summary for fault in FAULTS if not (fault.tests or fault.usages or fault.untested)] == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(FAULTS.index(fault) + 1))
def test_the_tests_of_a_fault_exist(fault: Fault) -> None:
    assert [name for name in fault.usages if name not in USAGES] == []
    for reference in fault.tests:
        path, function = reference.split("::")
        tree = ast.parse((ROOT / "tests" / path).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, reference
