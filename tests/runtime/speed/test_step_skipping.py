"""Step skipping: which steps run, for every kind of pipeline."""

import copy
from typing import Any

import numpy
import pytest
import torch

from anyaccel.forward_overrides import Slot, get_override
from anyaccel.planning.quality_levels import StepSkipping
from anyaccel.recipes import recipes, run
from anyaccel.runtime.pipeline import place
from anyaccel.runtime.speed.step_skipping import track_steps


class RunCounter:
    """Counts how often a layer runs."""

    def __init__(self, layer: torch.nn.Module) -> None:
        # Not a hook: a step runs if a layer has hooks.
        self.runs, self.forward = 0, layer.forward
        layer.forward = self.count

    def count(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return self.forward(*args, **kwargs)


def call(pipe: Any, name: str, steps: int = 8) -> Any:
    arguments = {**recipes()[name].call(), "num_inference_steps": steps, "generator": torch.Generator().manual_seed(0)}
    return pipe(**arguments)


def test_a_fast_pipeline_runs_fewer_steps() -> None:
    pipe = place(recipes()["stable-diffusion"].make(), "cpu", dtype="float32", speed="fast", capture=False)
    counter = RunCounter(pipe.unet.conv_in)
    fast = call(pipe, "stable-diffusion").images
    assert (
        counter.runs
        == pipe.plan.step_skipping.value.count(len(pipe.scheduler.timesteps))
        < len(pipe.scheduler.timesteps)
    )
    assert "outputs reused" in pipe.plan.report.step_skipping.value
    assert "step" not in vars(pipe.scheduler), "the override must be removed"
    numpy.testing.assert_array_equal(call(pipe, "stable-diffusion").images, fast)
    pipe.to("cpu", speed="exact", capture=False)
    before = counter.runs
    exact = call(pipe, "stable-diffusion").images
    assert counter.runs - before == len(pipe.scheduler.timesteps)
    assert numpy.abs(exact - fast).max() > 0, "no step was skipped"
    assert get_override(pipe.unet, Slot.STEP_SKIPPING) is None


@pytest.mark.parametrize("name", ["flux", "stable-diffusion-3", "pixart-alpha", "wan", "qwen-image"])
def test_step_skipping_works_for_every_pipeline(name: str) -> None:
    recipe = recipes()[name]
    pipe = place(recipe.make(), "cpu", dtype="float32", speed="draft")
    counter = RunCounter(next(layer for layer in pipe.transformer.modules() if isinstance(layer, torch.nn.Linear)))
    call(pipe, name, 6)
    fast = counter.runs
    assert "outputs reused" in pipe.plan.report.step_skipping.value
    pipe.to("cpu", speed="exact")
    call(pipe, name, 6)
    assert fast < counter.runs - fast


def test_every_step_runs_if_a_layer_has_a_hook() -> None:
    pipe = place(recipes()["stable-diffusion"].make(), "cpu", dtype="float32", speed="fast")
    runs: list[None] = []
    handle = pipe.unet.mid_block.register_forward_hook(lambda *_: runs.append(None))
    call(pipe, "stable-diffusion")
    assert len(runs) == len(pipe.scheduler.timesteps)
    handle.remove()
    call(pipe, "stable-diffusion")
    assert "outputs reused" in pipe.plan.report.step_skipping.value


def test_exact_pipeline_has_no_override() -> None:
    recipe = recipes()["stable-diffusion"]
    pipe = place(recipe.make(), "cpu", dtype="float32", capture=False)
    run(recipe, pipe)
    assert get_override(pipe.unet, Slot.STEP_SKIPPING) is None
    assert pipe.plan.step_skipping.value is None


def test_two_runs_per_step_have_two_stored_outputs() -> None:
    class Scheduler:
        timesteps = torch.arange(6)

        def set_timesteps(self) -> None: ...

        def step(self, value: Any) -> Any:
            return value

    class Pipe:
        scheduler = Scheduler()

    rule = StepSkipping(2, 0.0, 2, "")
    outputs = []
    with track_steps(Pipe(), rule) as skipper:
        assert skipper is not None
        for step in range(6):
            pair = [
                skipper.run_or_reuse(0, lambda x, n=number, s=step: (torch.tensor([n, s]),), (torch.zeros(1),), {})
                for number in (1, 2)
            ]
            outputs.append([tuple(output[0].tolist()) for output in pair])
            Pipe.scheduler.step(None)
    assert [pair[0][0] for pair in outputs] == [1] * 6
    assert [pair[1][0] for pair in outputs] == [2] * 6
    assert [pair[0][1] for pair in outputs] == [step if rule.is_run(step, 6) else step - 1 for step in range(6)]
    assert skipper.reused == 2 * (6 - rule.count(6))


def test_new_input_shape_is_run() -> None:
    class Scheduler:
        timesteps = torch.arange(9)
        step = set_timesteps = staticmethod(lambda: None)

    class Pipe:
        scheduler = Scheduler()

    with track_steps(Pipe(), StepSkipping(9, 0.0, 2, "")) as skipper:
        assert skipper is not None
        skipper.run_or_reuse(0, lambda x: x, (torch.zeros(1),), {})
        skipper.finish_step()
        assert skipper.run_or_reuse(0, lambda x: x, (torch.ones(2),), {}).tolist() == [1, 1]
        skipper.finish_step()
        assert skipper.run_or_reuse(0, lambda x: x, (torch.zeros(2),), {}).tolist() == [1, 1], "the stored output"


def test_copied_scheduler_does_not_count_steps() -> None:
    pipe: Any = recipes()["stable-diffusion"].make()
    pipe.scheduler.set_timesteps(4)
    with track_steps(pipe, StepSkipping(2, 0.0, 2, "")) as skipper:
        assert skipper is not None
        other = copy.deepcopy(pipe.scheduler)
        other.step(torch.zeros(1, 4, 2, 2), other.timesteps[0], torch.zeros(1, 4, 2, 2))
        assert skipper.step == 0
        assert other.step.__self__ is other


def test_pipelines_that_share_a_model_are_independent() -> None:
    name = "stable-diffusion"
    draft = place(recipes()[name].make(), "cpu", dtype="float32", speed="draft")
    exact = place(recipes()[name].make(), "cpu", dtype="float32")
    exact.unet = draft.unet
    undisturbed = call(draft, name).images, call(exact, name).images
    between = []

    def run_exact(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        if step == 2:
            between.append(call(exact, name).images)
        return values

    arguments = {**recipes()[name].call(), "num_inference_steps": 8, "generator": torch.Generator().manual_seed(0)}
    image = draft(**arguments, callback_on_step_end=run_exact).images
    numpy.testing.assert_allclose(image, undisturbed[0], atol=1e-5)
    numpy.testing.assert_allclose(between[0], undisturbed[1], atol=1e-5)


def test_remaining_steps_of_a_schedule_are_counted() -> None:
    name = "stable-diffusion-image-to-image"
    pipe = place(recipes()[name].make(), "cpu", dtype="float32", speed="draft")
    arguments = {**recipes()[name].call(), "num_inference_steps": 8, "strength": 0.3}
    pipe(**arguments)
    assert "every step ran" in pipe.plan.report.step_skipping.value, (
        "only two of eight steps remain, too few to skip any"
    )
    pipe(**{**arguments, "strength": 1.0})
    assert "outputs reused" in pipe.plan.report.step_skipping.value


def test_first_call_skips_the_same_steps_as_the_second() -> None:
    name = "stable-cascade-prior"
    pipe = place(recipes()[name].make(), "cpu", dtype="float32", speed="draft")
    reasons = []
    for _ in range(2):
        call(pipe, name)
        reasons.append(pipe.plan.report.step_skipping.value)
    assert reasons[0] == reasons[1]


def test_copies_skip_steps_too() -> None:
    pipe = place(recipes()["stable-diffusion"].make(), "cpu", dtype="float32", speed="draft")
    expected = call(pipe, "stable-diffusion").images
    other = copy.deepcopy(pipe)
    numpy.testing.assert_allclose(call(other, "stable-diffusion").images, expected, atol=1e-5)
    assert "outputs reused" in other.plan.report.step_skipping.value
