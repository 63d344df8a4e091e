"""Tiling and slicing that the user enabled stay enabled when anyaccel switches its own on and off."""

from typing import Any

import pytest

import anyaccel
from anyaccel.emulator.run_forked import run_forked
from anyaccel.recipes import recipes
from anyaccel.tracing.footprint_measurement import set_vae_tiling
from tests.conftest import NEEDS_RECIPES

pytestmark = NEEDS_RECIPES


@pytest.mark.parametrize("user", [(), ("tiling",), ("slicing",), ("tiling", "slicing")])
def test_the_state_of_the_user_is_restored(user: tuple[str, ...]) -> None:
    pipe: Any = recipes()["stable-diffusion"].make()
    for name in user:
        getattr(pipe.vae, f"enable_{name}")()
    for _ in range(2):
        set_vae_tiling(pipe, True)
        assert (pipe.vae.use_tiling, pipe.vae.use_slicing) == (True, True)
        set_vae_tiling(pipe, False)
        assert (pipe.vae.use_tiling, pipe.vae.use_slicing) == ("tiling" in user, "slicing" in user)
    set_vae_tiling(pipe, False)
    assert pipe.vae.use_tiling == ("tiling" in user)


def test_a_large_call_does_not_switch_off_slicing() -> None:
    def use(_: Any) -> list[tuple[bool, bool]]:
        recipe = recipes()["stable-diffusion"]
        pipe: Any = anyaccel.place(recipe.make(), "neuron", dtype="float32")
        pipe.vae.enable_slicing()
        states = []
        for size in (16, 64, 16):
            pipe(**{**recipe.call(), "height": size, "width": size})
            states.append((pipe.vae.use_tiling, pipe.vae.use_slicing))
        return states

    assert run_forked("neuron", use, memory="8MiB") == [(False, True), (True, True), (False, True)]
