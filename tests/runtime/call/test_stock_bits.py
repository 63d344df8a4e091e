"""On the CPU in float32 with default options, a placed pipeline is bitwise equal to stock diffusers."""

from typing import Any

import numpy
import pytest

import anyaccel
from anyaccel.processes.forked_call import call_in_fork
from anyaccel.recipes import recipes, run
from tests.conftest import NEEDS_RECIPES

pytestmark = [NEEDS_RECIPES, pytest.mark.filterwarnings("ignore")]  # diffusers warns about its deprecated pipelines

FEW = ("stable-diffusion", "flux", "wan", "stable-audio", "qwen-image", "kandinsky-2-2", "controlnet", "ltx-2")


def check(name: str) -> None:
    recipe = recipes()[name]
    expected = run(recipe, recipe.make())
    pipe: Any = anyaccel.place(recipe.make(), "cpu", dtype="float32")
    for _ in range(2):
        numpy.testing.assert_array_equal(run(recipe, pipe), expected)


@pytest.mark.parametrize("name", FEW)
def test_some_pipelines_give_stock_bits(name: str) -> None:
    # In a fork: some pipelines compute gradients, after which the test process could not fork virtual devices.
    call_in_fork(lambda: check(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(recipes()) - set(FEW)))
def test_all_pipelines_give_stock_bits(name: str) -> None:
    call_in_fork(lambda: check(name))
