"""Generators that a pipeline creates on the device draw the CPU's values during a call, and only then."""

from __future__ import annotations

import threading

import pytest
import torch

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.recipes import recipes, run
from anyaccel.runtime.workarounds.cpu_generators import use_cpu_generators
from tests.conftest import NEEDS_RECIPES


def test_generators_are_replaced_in_the_block_and_the_thread() -> None:
    original = torch.Generator

    def use(accelerator: VirtualAccelerator) -> None:
        device = accelerator.device()
        with use_cpu_generators(device), use_cpu_generators(device):
            assert torch.Generator(device=device).device.type == "cpu"
            assert torch.Generator(str(device)).device.type == "cpu"
            assert isinstance(torch.Generator(), original)
            others: list[torch.Generator] = []
            thread = threading.Thread(target=lambda: others.append(torch.Generator(device)))
            thread.start()
            thread.join()
            assert others[0].device == device
        assert torch.Generator(device).device == device

    run_forked("mps", use)


@NEEDS_RECIPES
@pytest.mark.parametrize("device", ["neuron", "xpu"])
def test_noise_of_a_pipeline_that_creates_generators(device: str) -> None:
    recipe = recipes()["ltx-long-multi-prompt"]
    expected = run(recipe, recipe.make())

    def use(accelerator: VirtualAccelerator) -> None:
        actual = run(recipe, anyaccel.place(recipe.make(), accelerator.device(), dtype="float32"))
        assert abs(actual - expected).max() < 1e-3

    run_forked(device, use, strict=True)
