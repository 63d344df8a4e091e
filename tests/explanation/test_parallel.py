"""`explain` with several devices: when a split is needed, and what it changes."""

from dataclasses import replace

import pytest

import anyaccel
from anyaccel.errors import UsageError
from anyaccel.explanation.device_argument import find_device_target
from anyaccel.explanation.parallel import describe_gain
from anyaccel.planning.facts import ComponentFacts, PipelineFacts
from anyaccel.planning.footprint import Footprint, MemorySavings, ModelCall, ModelSize

FLUX, SD = "black-forest-labs/FLUX.1-schnell", "stable-diffusion-v1-5/stable-diffusion-v1-5"
GIB = 2**30
WAN = ComponentFacts(
    name="transformer", kind="Wan", dtype="bfloat16", parameters=14, denoises=True, splits=("context",), heads=40
)


def measure_wan(savings: MemorySavings, images: int, images_per_call: int | None = None, /) -> Footprint:
    size = ModelSize(name="transformer", kind="Wan", parameters=14, weights_bytes=27 * GIB, layer_bytes=GIB)
    calls = (ModelCall("transformer", "denoise", 10 * GIB),)
    return Footprint(
        pipeline="WanPipeline", dtype="bfloat16", size=None, images=1, models=(size,), model_calls=calls
    )  # fmt: skip


def test_notes_describe_both_splits_for_flux_on_gaudi1() -> None:
    plan = anyaccel.explain(FLUX, "gaudi1")
    assert plan.forecast is not None
    tensor, context = plan.forecast.notes[-2:]
    assert tensor == (
        "parallel='tensor' is not available: "
        "diffusers supports tensor parallelism only on cuda, neuron, tpu, xpu, not on hpu"
    )
    assert context.startswith("parallel='context:8': each rank processes 576 of 4,608 tokens")
    assert "each rank holds all 31.4 GiB of weights" in context
    assert context in plan.to_dict()["notes"]
    assert plan.parallel.value is None


def test_split_weights_are_resident() -> None:
    plan = anyaccel.explain(FLUX, "neuron:24GiB", parallel="tensor:4")
    assert plan.forecast is not None
    assert plan.forecast.fits
    assert str(plan.memory).startswith("everything resident")
    assert dict(plan.forecast.components)["transformer"] == pytest.approx(10.2 * GIB, rel=0.03)
    assert "each rank holds 5.4 billion of 11.9 billion parameters of transformer" in plan.parallel.reason
    assert str(plan.compile_policy) == "never"


def test_a_long_sequence_gets_a_note_even_if_the_weights_are_resident() -> None:
    target, facts = find_device_target("h100"), PipelineFacts(pipeline="WanPipeline", components=(WAN,))
    long, short = {"transformer": 75_600}, {"transformer": 4_096}
    notes = describe_gain(target, facts, measure_wan, long, resident=True, requested=False)
    assert len(notes) == 1
    assert notes[0].startswith("parallel='context:8': each rank processes 9,450 of 75,600 tokens")
    assert describe_gain(target, facts, measure_wan, short, resident=True, requested=False) == ()
    notes = describe_gain(target, facts, measure_wan, short, resident=True, requested=True)
    assert notes[0] == "parallel='tensor' is not available: diffusers has no tensor-parallel plan for Wan"


def test_the_device_count_divides_the_heads() -> None:
    facts = PipelineFacts(pipeline="P", components=(replace(WAN, heads=12),))
    notes = describe_gain(
        find_device_target("h100"), facts, measure_wan, {"transformer": 50_000}, resident=True, requested=False
    )
    assert notes[0].startswith("parallel='context:4'")


def test_an_impossible_split_raises() -> None:
    with pytest.raises(UsageError, match="no context-parallel plan for UNet2DConditionModel"):
        anyaccel.explain(SD, "gaudi2", parallel="context:2")
    with pytest.raises(UsageError, match="parallel must be 'auto', 'cfg', 'tensor'"):
        anyaccel.explain(SD, "gaudi2", parallel="both")
