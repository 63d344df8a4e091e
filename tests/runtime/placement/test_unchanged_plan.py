"""A plan never changes after placement; the run report records later events."""

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
from anyaccel.runtime.speed import compile as compile_module
from tests.conftest import NEEDS_RECIPES
from tests.runtime.speed.small_pipelines import make_small

pytestmark = [NEEDS_RECIPES, pytest.mark.usefixtures("pipelines_imported")]


def list_decisions(plan: Any) -> list[tuple[str, str, str]]:
    return [(name, str(decision), decision.reason) for name, decision in plan.decisions()]


def test_a_plan_cannot_be_edited_or_replaced() -> None:
    pipe: Any = anyaccel.place(recipes()["stable-diffusion"].make(), "cpu", dtype="float32")
    with pytest.raises(FrozenInstanceError):
        pipe.plan.dtype = Decision("float16", "requested")
    placement: Any = find_placement(pipe)
    with pytest.raises(AttributeError, match="read-only"):
        placement.plan = pipe.plan


@pytest.mark.slow
def test_compilation_and_step_skipping_do_not_change_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "_find_backend", lambda *args, **options: "eager")
    pipe: Any = anyaccel.place(make_small(), "cpu", dtype="float32", compile=True, speed="fast")
    plan, before = pipe.plan, list_decisions(pipe.plan)
    for size in (16, 32):
        pipe("a fox", height=size, width=size, num_inference_steps=8, num_images_per_prompt=2, output_type="np")
    assert pipe.plan is plan
    assert list_decisions(plan) == before
    report = dict(plan.report.entries())
    assert {"compiled_models", "compiled_sizes", "step_skipping"} <= set(report)
    assert all(name in str(plan) for name in report)
    assert {entry["name"] for entry in plan.to_dict()["report"]} == set(report)


def test_a_retry_in_float32_does_not_change_the_plan() -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[Any, ...]:
        recipe = recipes()["stable-diffusion"]
        pipe: Any = anyaccel.place(recipe.make(), "hpu", dtype="float16")
        plan, before = pipe.plan, list_decisions(pipe.plan)
        with torch.no_grad():
            pipe.vae.decoder.conv_in.weight.mul_(3e4)
            pipe.vae.decoder.conv_in.bias.mul_(3e4)
        result = pipe("a fox", height=16, width=16, num_inference_steps=2, output_type="np")
        after_nan = dict(plan.report.entries())
        in_result = dict(result.plan.report.entries())
        run(recipe, pipe)
        return pipe.plan is plan, list_decisions(plan) == before, sorted(after_nan), sorted(in_result)

    same, unchanged, reported, in_result = run_forked("hpu", use)
    assert same
    assert unchanged
    assert "float32_models" in reported
    assert reported == in_result


@pytest.mark.slow
def test_running_out_of_memory_does_not_change_the_plan() -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[Any, ...]:
        recipe = recipes()["stable-diffusion"]
        pipe: Any = anyaccel.place(recipe.make(), "hpu", dtype="float32")
        plan, before = pipe.plan, list_decisions(pipe.plan)
        pipe("a fox", height=32, width=32, num_inference_steps=1, num_images_per_prompt=8, output_type="np")
        return pipe.plan is plan, list_decisions(plan) == before, str(plan.memory), str(plan.memory_in_use)

    same, unchanged, planned, used = run_forked("hpu", use, memory=5 * 2**18)
    assert same
    assert unchanged
    assert planned == "everything resident"
    assert used != planned
