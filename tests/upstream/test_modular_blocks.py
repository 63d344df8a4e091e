"""The blocks of modular pipelines, on which anyaccel depends."""

from types import SimpleNamespace
from typing import Any

import pytest

from anyaccel.recipes import recipes
from anyaccel.upstream import modular_blocks
from tests.conftest import NEEDS_RECIPES

pytestmark = NEEDS_RECIPES


def test_disable_progress_bars_also_reaches_nested_blocks() -> None:
    pipe: Any = recipes()["stable-diffusion-xl-modular"].make()
    blocks = [getattr(pipe, modular_blocks.BLOCKS_ATTRIBUTE)]
    for block in blocks:
        blocks += (block.sub_blocks or {}).values()
    loops: list[Any] = [block for block in blocks if hasattr(block, "set_progress_bar_config")]
    assert loops
    for loop in loops:
        loop.set_progress_bar_config(disable=False)
    pipe.set_progress_bar_config(disable=True)
    assert {"disable": False} in [loop._progress_bar_config for loop in loops], "diffusers now disables nested bars"
    modular_blocks.disable_progress_bars(pipe)
    assert all(loop._progress_bar_config == {"disable": True} for loop in loops)


def test_configure_progress_bars() -> None:
    pipe: Any = recipes()["stable-diffusion-xl-modular"].make()
    blocks = [block for block in modular_blocks.list_blocks(pipe) if hasattr(block, "progress_bar")]
    assert blocks, "the loop over the steps is a block inside of other blocks"
    modular_blocks.configure_progress_bars(pipe, disable=None, desc="x")
    assert all(block._progress_bar_config == {"disable": None, "desc": "x"} for block in blocks)
    assert modular_blocks.list_blocks(object()) == []


@pytest.mark.parametrize("name", ["stable-diffusion", "stable-diffusion-xl-modular"])
def test_progress_bars_disabled(name: str) -> None:
    pipe: Any = recipes()[name].make()
    owners = [pipe, *modular_blocks.list_blocks(pipe)]
    assert modular_blocks.read_progress_bar_config(SimpleNamespace()) == {}
    modular_blocks.configure_progress_bars(pipe, leave=False)
    before = [getattr(owner, "_progress_bar_config", None) for owner in owners]
    assert modular_blocks.read_progress_bar_config(pipe) == {"leave": False}
    with modular_blocks.progress_bars_disabled(pipe):
        assert modular_blocks.read_progress_bar_config(pipe) == {"disable": True}
    assert [getattr(owner, "_progress_bar_config", None) for owner in owners] == before
