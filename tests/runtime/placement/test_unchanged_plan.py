"""A plan is decided once: whatever happens later goes into the run report."""

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.planning.decision import Decision
from anyaccel.recipes import recipes, run
from anyaccel.runtime.placement_state import find_placement
from anyaccel.runtime.speed import compile as compiling
from tests.conftest import NEEDS_RECIPES

pytestmark = [NEEDS_RECIPES, pytest.mark.usefixtures("pipelines_imported")]


def read(plan: Any) -> list[tuple[str, str, str]]:
    return [(name, str(decision), decision.reason) for name, decision in plan.decisions()]


def test_a_plan_cannot_be_edited_or_replaced() -> None:
    pipe: Any = anyaccel.place(recipes()["stable-diffusion"].make(), "cpu", dtype="float32")
    with pytest.raises(FrozenInstanceError):
        pipe.plan.dtype = Decision("float16", "a wish")
    placement: Any = find_placement(pipe)
    with pytest.raises(AttributeError, match="never replaced"):
        placement.plan = pipe.plan


@pytest.mark.long
def test_calls_compiling_and_reuse_leave_the_plan_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_find_backend", lambda *given: "eager")
    recipe = recipes()["stable-diffusion"]
    pipe: Any = anyaccel.place(recipe.make(), "cpu", dtype="float32", compile=True, speed="fast")
    plan, before = pipe.plan, read(pipe.plan)
    for size in (16, 32):
        pipe("a fox", height=size, width=size, num_inference_steps=8, num_images_per_prompt=2, output_type="np")
    assert pipe.plan is plan
    assert read(plan) == before
    happened = dict(plan.report.entries())
    assert {"compiled_models", "compiled_sizes", "step_skipping"} <= set(happened)
    assert all(name in str(plan) for name in happened)
    assert {entry["name"] for entry in plan.to_dict()["report"]} == set(happened)


def test_nan_and_memory_leave_the_plan_alone() -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[Any, ...]:
        recipe = recipes()["stable-diffusion"]
        pipe: Any = anyaccel.place(recipe.make(), "hpu", dtype="float16")
        plan, before = pipe.plan, read(pipe.plan)
        with torch.no_grad():
            pipe.vae.decoder.conv_in.weight.mul_(3e4)
            pipe.vae.decoder.conv_in.bias.mul_(3e4)
        result = pipe("a fox", height=16, width=16, num_inference_steps=2, output_type="np")
        after_nan = dict(plan.report.entries())
        in_result = dict(result.plan.report.entries())
        run(recipe, pipe)
        return pipe.plan is plan, read(plan) == before, sorted(after_nan), sorted(in_result)

    same, unchanged, happened, in_result = run_forked("hpu", use)
    assert same
    assert unchanged
    assert "float32_models" in happened
    assert happened == in_result


@pytest.mark.long
def test_running_out_of_memory_leaves_the_plan_alone() -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[Any, ...]:
        recipe = recipes()["stable-diffusion"]
        pipe: Any = anyaccel.place(recipe.make(), "hpu", dtype="float32")
        plan, before = pipe.plan, read(pipe.plan)
        pipe("a fox", height=64, width=64, num_inference_steps=1, num_images_per_prompt=8, output_type="np")
        return pipe.plan is plan, read(plan) == before, str(plan.memory), str(plan.memory_in_use)

    same, unchanged, planned, used = run_forked("hpu", use, memory=3 * 2**20)
    assert same
    assert unchanged
    assert planned == "everything resident"
    assert used != planned
