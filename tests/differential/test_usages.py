"""Every usage gives the same result with a placed pipeline as with stock diffusers."""

from __future__ import annotations

import functools

import pytest

from tests.conftest import NEEDS_RECIPES
from tests.differential import building, calling, editing  # noqa: F401 - they register the usages
from tests.differential.session import USAGES, VARIANTS, Observation, find_differences, observe

pytestmark = [NEEDS_RECIPES, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

FAILING = {
    "custom_timesteps", "invalid_size", "latents_of_wrong_shape", "missing_prompt", "prompt_of_wrong_type",
    "too_few_generators",
}  # fmt: skip
"""Usages that raise in stock diffusers too. Any other usage must produce a result to compare."""


@functools.cache
def expect(name: str) -> Observation:
    """Return what stock diffusers produces."""
    return observe(USAGES[name], None)


@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("name", list(USAGES))
def test_a_placed_pipeline_gives_the_result_of_stock_diffusers(name: str, variant: str) -> None:
    usage = USAGES[name]
    if variant in usage.skip:
        pytest.skip(usage.skip[variant])
    expected, actual = expect(name), observe(usage, VARIANTS[variant])
    assert bool(expected.error) == (name in FAILING), expected.error
    if usage.rejected:
        assert usage.rejected in actual.error
        return
    tolerance = max(usage.tolerance, VARIANTS[variant].tolerance)
    assert find_differences(expected, actual, tolerance) == []
