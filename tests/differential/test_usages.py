"""Every usage gives the same result with a placed pipeline as with stock diffusers."""

from __future__ import annotations

import zlib

import pytest

import tests.differential.usages  # noqa: F401 - registers the usages
from tests.conftest import NEEDS_RECIPES
from tests.differential.execution import prepare_forks
from tests.differential.open_differences import OPEN
from tests.differential.results import run_usage
from tests.differential.session import USAGES, VARIANTS

pytestmark = [NEEDS_RECIPES, pytest.mark.filterwarnings("ignore")]

ON_CPU = [name for name, variant in VARIANTS.items() if variant.stock_device == "cpu"]
# A usage takes half a second to a second of CPU time: once with stock diffusers, once placed on the CPU. All of them
# would take too long for CI, which therefore runs a fixed eighth.
IN_CI = [name for name in USAGES if zlib.crc32(name.encode()) % 8 == 0]


@pytest.fixture(scope="module", autouse=True)
def forks() -> None:
    prepare_forks()


def check(name: str, variant: str) -> None:
    (result,) = run_usage(name, [variant])
    if result.status == "skipped":
        pytest.skip(result.text)
    if result.status == "open":
        pytest.xfail(result.text)
    assert result.status != "different", result.text
    assert name not in OPEN.get(variant, {}), "fixed: remove it from open_differences.py"


@pytest.mark.parametrize("name", IN_CI)
def test_a_selection_on_the_cpu(name: str) -> None:
    check(name, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("variant", ON_CPU)
@pytest.mark.parametrize("name", list(USAGES))
def test_a_placed_pipeline_gives_the_result_of_stock_diffusers(name: str, variant: str) -> None:
    check(name, variant)


def test_open_differences_name_usages() -> None:
    assert [name for names in OPEN.values() for name in names if name not in USAGES] == []
