"""Explaining several devices: when one model over them is needed, and what it buys."""

from dataclasses import replace

import pytest

import anyaccel
from anyaccel.errors import UsageError
from anyaccel.explanation.device_target import find_device_target
from anyaccel.explanation.parallel import describe_gain
from anyaccel.planning.facts import ComponentFacts, PipelineFacts
from anyaccel.planning.footprint import Footprint, MemorySavings, ModelCall, ModelSize

FLUX, SD = "black-forest-labs/FLUX.1-schnell", "stable-diffusion-v1-5/stable-diffusion-v1-5"
GIB = 2**30
WAN = ComponentFacts(
    name="transformer", kind="Wan", dtype="bfloat16", parameters=14, denoises=True, splits=("context",), heads=40
)


def measure_wan(way: MemorySavings, images: int) -> Footprint:
    size = ModelSize(name="transformer", kind="Wan", parameters=14, weights_bytes=27 * GIB, layer_bytes=GIB)
    passings = (ModelCall("transformer", "denoise", 10 * GIB),)
    return Footprint(
        pipeline="WanPipeline", dtype="bfloat16", size=None, images=1, models=(size,), passings=passings
    )  # fmt: skip


def test_flux_on_the_first_gaudi_does_not_stay_there_and_is_told_of_both_splits() -> None:
    plan = anyaccel.explain(FLUX, "gaudi1")
    assert plan.forecast is not None
    tensor, context = plan.forecast.notes[-2:]
    assert tensor == (
        "parallel='tensor' is not to be had here: diffusers splits weights on cuda, neuron, tpu, xpu, and not on hpu"
    )
    assert context.startswith("parallel='context:8': of 4,608 tokens a rank takes 576")
    assert "each has all 31.4 GiB of weights" in context
    assert context in plan.to_dict()["notes"]
    assert plan.parallel.value is None


def test_weights_that_are_split_stay_on_a_device_that_one_model_at_a_time_would_need() -> None:
    plan = anyaccel.explain(FLUX, "neuron:24GiB", parallel="tensor:4")
    assert plan.forecast is not None
    assert plan.forecast.fits
    assert str(plan.memory).startswith("everything resident")
    assert dict(plan.forecast.components)["transformer"] == pytest.approx(10.2 * GIB, rel=0.03)
    assert "of transformer's 11.9 billion weights a rank holds 5.4 billion" in plan.parallel.reason
    assert str(plan.compile_policy) == "never"


def test_a_long_sequence_is_worth_several_devices_though_the_weights_stay() -> None:
    target, facts = find_device_target("h100"), PipelineFacts(pipeline="WanPipeline", components=(WAN,))
    long, short = {"transformer": 75_600}, {"transformer": 4_096}
    said = describe_gain(target, facts, measure_wan, long, resident=True, asked=False)
    assert len(said) == 1
    assert said[0].startswith("parallel='context:8': of 75,600 tokens a rank takes 9,450")
    assert describe_gain(target, facts, measure_wan, short, resident=True, asked=False) == ()
    asked = describe_gain(target, facts, measure_wan, short, resident=True, asked=True)
    assert asked[0] == "parallel='tensor' is not to be had here: diffusers has no tensor-parallel plan for Wan"


def test_counts_divide_the_heads() -> None:
    facts = PipelineFacts(pipeline="P", components=(replace(WAN, heads=12),))
    said = describe_gain(
        find_device_target("h100"), facts, measure_wan, {"transformer": 50_000}, resident=True, asked=False
    )
    assert said[0].startswith("parallel='context:4'")


def test_what_cannot_be_split_is_refused_before_anything_is_worked_out() -> None:
    with pytest.raises(UsageError, match="no context-parallel plan for UNet2DConditionModel"):
        anyaccel.explain(SD, "gaudi2", parallel="context:2")
    with pytest.raises(UsageError, match="parallel must be auto, tensor:N"):
        anyaccel.explain(SD, "gaudi2", parallel="both")
