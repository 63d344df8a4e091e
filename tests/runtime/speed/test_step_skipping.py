"""Step reuse: the steps that the plan says are run, in every kind of pipeline, and the picture stays like itself."""

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


class Counted:
    """How often a model's own layers ran."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.runs = 0
        layer.register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.runs += 1


def call(pipe: Any, name: str, steps: int = 8) -> Any:
    given = {**recipes()[name].call(), "num_inference_steps": steps, "generator": torch.Generator().manual_seed(0)}
    return pipe(**given)


def test_a_fast_pipeline_runs_fewer_steps() -> None:
    pipe = place(recipes()["stable-diffusion"].make(), "cpu", dtype="float32", speed="fast", capture=False)
    counted = Counted(pipe.unet.conv_in)
    fast = call(pipe, "stable-diffusion").images
    assert (
        counted.runs
        == pipe.plan.step_skipping.value.count(len(pipe.scheduler.timesteps))
        < len(pipe.scheduler.timesteps)
    )
    assert "outputs reused" in pipe.plan.report.step_skipping.value
    assert "step" not in vars(pipe.scheduler), "nothing is left behind"
    numpy.testing.assert_array_equal(call(pipe, "stable-diffusion").images, fast)
    pipe.to("cpu", speed="exact", capture=False)
    before = counted.runs
    exact = call(pipe, "stable-diffusion").images
    assert counted.runs - before == len(pipe.scheduler.timesteps)
    assert numpy.abs(exact - fast).max() > 0, "it is another picture"
    assert get_override(pipe.unet, Slot.STEP_REUSE) is None


@pytest.mark.parametrize("name", ["flux", "stable-diffusion-3", "pixart-alpha", "wan", "qwen-image"])
def test_it_is_for_every_kind_of_pipeline(name: str) -> None:
    recipe = recipes()[name]
    pipe = place(recipe.make(), "cpu", dtype="float32", speed="draft")
    counted = Counted(next(part for part in pipe.transformer.modules() if isinstance(part, torch.nn.Linear)))
    call(pipe, name, 6)
    fast = counted.runs
    assert "outputs reused" in pipe.plan.report.step_skipping.value
    pipe.to("cpu", speed="exact")
    call(pipe, name, 6)
    assert fast < counted.runs - fast


def test_an_exact_pipeline_has_nothing_standing_in() -> None:
    recipe = recipes()["stable-diffusion"]
    pipe = place(recipe.make(), "cpu", dtype="float32", capture=False)
    run(recipe, pipe)
    assert get_override(pipe.unet, Slot.STEP_REUSE) is None
    assert pipe.plan.step_skipping.value is None


def test_a_model_that_is_asked_twice_a_step_has_two_answers() -> None:
    class Scheduler:
        timesteps = torch.arange(6)

        def set_timesteps(self) -> None: ...

        def step(self, value: Any) -> Any:
            return value

    class Pipe:
        scheduler = Scheduler()

    rule = StepSkipping(2, 0.0, 2, "")
    heard = []
    with track_steps(Pipe(), rule) as steps:
        assert steps is not None
        for step in range(6):
            pair = [
                steps.answer(0, lambda x, n=number, s=step: (torch.tensor([n, s]),), (torch.zeros(1),), {})
                for number in (1, 2)
            ]
            heard.append([tuple(one[0].tolist()) for one in pair])
            Pipe.scheduler.step(None)
    assert [pair[0][0] for pair in heard] == [1] * 6
    assert [pair[1][0] for pair in heard] == [2] * 6
    assert [pair[0][1] for pair in heard] == [step if rule.is_run(step, 6) else step - 1 for step in range(6)]
    assert steps.reused == 2 * (6 - rule.count(6))


def test_another_shape_is_run() -> None:
    class Scheduler:
        timesteps = torch.arange(9)
        step = set_timesteps = staticmethod(lambda: None)

    class Pipe:
        scheduler = Scheduler()

    with track_steps(Pipe(), StepSkipping(9, 0.0, 2, "")) as steps:
        assert steps is not None
        steps.answer(0, lambda x: x, (torch.zeros(1),), {})
        steps.next()
        assert steps.answer(0, lambda x: x, (torch.ones(2),), {}).tolist() == [1, 1]
        steps.next()
        assert steps.answer(0, lambda x: x, (torch.zeros(2),), {}).tolist() == [1, 1], "as it was"


def test_a_copied_scheduler_steps_by_itself() -> None:
    pipe: Any = recipes()["stable-diffusion"].make()
    pipe.scheduler.set_timesteps(4)
    with track_steps(pipe, StepSkipping(2, 0.0, 2, "")) as steps:
        assert steps is not None
        other = copy.deepcopy(pipe.scheduler)
        other.step(torch.zeros(1, 4, 2, 2), other.timesteps[0], torch.zeros(1, 4, 2, 2))
        assert steps.step == 0
        assert other.step.__self__ is other


def test_two_pipelines_with_one_model_do_not_disturb_each_other() -> None:
    name = "stable-diffusion"
    draft = place(recipes()[name].make(), "cpu", dtype="float32", speed="draft")
    exact = place(recipes()[name].make(), "cpu", dtype="float32")
    exact.unet = draft.unet
    undisturbed = call(draft, name).images, call(exact, name).images
    between = []

    def look(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        if step == 2:
            between.append(call(exact, name).images)
        return values

    given = {**recipes()[name].call(), "num_inference_steps": 8, "generator": torch.Generator().manual_seed(0)}
    made = draft(**given, callback_on_step_end=look).images
    numpy.testing.assert_allclose(made, undisturbed[0], atol=1e-5)
    numpy.testing.assert_allclose(between[0], undisturbed[1], atol=1e-5)


def test_the_steps_that_are_left_of_a_schedule_count() -> None:
    name = "stable-diffusion-image-to-image"
    pipe = place(recipes()[name].make(), "cpu", dtype="float32", speed="draft")
    given = {**recipes()[name].call(), "num_inference_steps": 8, "strength": 0.3}
    pipe(**given)
    assert "every step was run" in pipe.plan.report.step_skipping.value, "two of eight are left"
    pipe(**{**given, "strength": 1.0})
    assert "outputs reused" in pipe.plan.report.step_skipping.value


def test_the_first_call_is_like_the_second() -> None:
    name = "stable-cascade-prior"
    pipe = place(recipes()[name].make(), "cpu", dtype="float32", speed="draft")
    reasons = []
    for _ in range(2):
        call(pipe, name)
        reasons.append(pipe.plan.report.step_skipping.value)
    assert reasons[0] == reasons[1]


def test_a_copy_is_as_fast() -> None:
    pipe = place(recipes()["stable-diffusion"].make(), "cpu", dtype="float32", speed="draft")
    expected = call(pipe, "stable-diffusion").images
    other = copy.deepcopy(pipe)
    numpy.testing.assert_allclose(call(other, "stable-diffusion").images, expected, atol=1e-5)
    assert "outputs reused" in other.plan.report.step_skipping.value
