"""Every usage gives the same result with a placed pipeline as with stock diffusers."""

from __future__ import annotations

import pytest

import tests.differential.usages  # noqa: F401 - registers the usages
from tests.conftest import NEEDS_RECIPES
from tests.differential.execution import prepare_forks
from tests.differential.results import run_usage
from tests.differential.session import USAGES, VARIANTS

pytestmark = [NEEDS_RECIPES, pytest.mark.filterwarnings("ignore")]

ON_CPU = [name for name, variant in VARIANTS.items() if variant.stock_device == "cpu"]


@pytest.fixture(scope="module", autouse=True)
def forks() -> None:
    prepare_forks()


@pytest.mark.slow
@pytest.mark.parametrize("variant", ON_CPU)
@pytest.mark.parametrize("name", list(USAGES))
def test_a_placed_pipeline_gives_the_result_of_stock_diffusers(name: str, variant: str) -> None:
    (result,) = run_usage(name, [variant])
    if result.status == "skipped":
        pytest.skip(result.text)
    if result.status == "open":
        pytest.xfail(result.text)
    assert result.status != "different", result.text
