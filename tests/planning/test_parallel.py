"""Choice of the split across devices, by model, device and number of processes."""

from dataclasses import replace
from typing import Any

import pytest

from anyaccel.backends.sheet import Distributed
from anyaccel.errors import UsageError
from anyaccel.planning import PlacementOptions
from anyaccel.planning.facts import ComponentFacts, PipelineFacts
from anyaccel.planning.options import read_options, read_parallel
from anyaccel.planning.parallel import Ranks, Split, choose_parallel, count_rank_parameters
from anyaccel.planning.plan import make_plan
from tests.planning.sheets import NAMES, real_sheet, without_limits

CLAIM: dict[str, Any] = {"says": "A documented fact.", "source": "https://example.org", "evidence": "documented"}
SHEET = without_limits(distributed=Distributed(backend="b", **CLAIM))
FLUX = ComponentFacts(
    name="transformer", kind="Flux", dtype="bfloat16", parameters=1_000, denoises=True, splits=("context", "tensor"),
    heads=24, sharded=600,
)  # fmt: skip
WAN = replace(FLUX, kind="Wan", splits=("context",), heads=40, sharded=0)
UNET = replace(FLUX, name="unet", kind="UNet", splits=(), heads=0, sharded=0)
ENCODER = ComponentFacts(name="text_encoder", kind="T5", dtype="bfloat16", parameters=50)
TWO = Ranks(count=2, tensor_types=("best",))


def choose(
    parallel: str | None, *models: ComponentFacts, ranks: Ranks = TWO, sheet: Any = SHEET, **placement_options: Any
) -> Any:
    facts = PipelineFacts(pipeline="P", components=(ENCODER, *models))
    return choose_parallel(sheet, facts, read_options({"parallel": parallel, **placement_options}), ranks)


def expect_error(*args: Any, **options: Any) -> UsageError:
    with pytest.raises(UsageError) as raised:
        choose(*args, **options)
    return raised.value


@pytest.mark.parametrize(
    ("text", "expected"),
    [("auto", ("auto", None)), ("cfg", ("cfg", None)), ("tensor:2", ("tensor", 2)), ("context", ("context", None))],
)
def test_valid_values(text: str, expected: tuple[str, int | None]) -> None:
    assert read_parallel(text) == expected


@pytest.mark.parametrize(
    "text", ["", "tensor:1", "tensor:0", "context:", "context:x", "cfg:3", "ring:2", "Auto", 2, True]
)
def test_other_values_raise(text: Any) -> None:
    with pytest.raises(UsageError, match=r"parallel must be 'auto', 'cfg', .* or 'context:N'"):
        read_options({"parallel": text})


def test_one_device_is_the_default() -> None:
    chosen = choose(None, FLUX)
    assert chosen.value is None
    assert str(chosen) == "-"


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("context:2", "context:2"),
        ("context", "context:2"),
        ("tensor:2", "tensor:2"),
        ("tensor", "tensor:2"),
        ("cfg", "cfg:2"),
    ],
)
def test_requested_split_is_chosen(text: str, split: str) -> None:
    assert str(choose(text, FLUX)) == split


def test_reason_states_the_gain() -> None:
    assert "each rank holds 700 of 1,000 parameters of transformer" in choose("tensor", FLUX).reason
    assert "each rank processes 1/2 of the sequence" in choose("context", FLUX).reason


@pytest.mark.parametrize("text", ["context:2", "tensor", "cfg"])
def test_one_process_is_not_enough(text: str) -> None:
    error = expect_error(text, FLUX, ranks=Ranks())
    assert "requires 2 processes, one per device, but only one is running" in error.message
    assert error.hint == "start the program with torchrun --nproc-per-node 2 program.py"


def test_rank_count_must_match_the_processes() -> None:
    error = expect_error("context:4", FLUX)
    assert "requires 4 processes, one per device, but 2 are running" in error.message
    assert "--nproc-per-node 4" in error.hint
    assert "--nproc-per-node 2" in expect_error("cfg", FLUX, ranks=Ranks(count=4)).hint


@pytest.mark.parametrize(
    ("text", "model", "message", "hint"),
    [
        ("tensor", WAN, "no tensor-parallel plan for Wan", "parallel='context'"),
        ("context", UNET, "no context-parallel plan for UNet", "parallel='cfg'"),
        ("tensor", replace(FLUX, quantized=True), "are quantized", "load the model without quantization"),
        ("context", replace(FLUX, kind="LTXVideoTransformer3DModel"), "masks, which have one row per head", "auto"),
    ],
)
def test_model_without_support_for_the_split(text: str, model: ComponentFacts, message: str, hint: str) -> None:
    error = expect_error(text, model)
    assert message in error.message
    assert hint in error.hint


def test_heads_must_be_divisible_by_the_ranks() -> None:
    error = expect_error("context", replace(FLUX, heads=30), ranks=Ranks(count=8))
    assert "Flux has 30 attention heads, and 30 is not divisible by 8" in error.message
    assert error.hint == "use parallel='context:6' with 6 processes"


def test_every_denoiser_needs_a_plan() -> None:
    control = replace(UNET, name="controlnet", kind="FluxControlNetModel")
    assert "FluxControlNetModel" in expect_error("context", FLUX, control).message
    assert "no denoising model to split" in expect_error("context").message


def test_device_without_tensor_parallelism_in_diffusers() -> None:
    error = expect_error("tensor", FLUX, ranks=Ranks(count=2, tensor_types=("other",)))
    assert "diffusers supports tensor parallelism only on other, not on best" in error.message
    assert "context" in error.hint


def test_device_without_a_distributed_backend() -> None:
    assert "no torch.distributed backend is known" in expect_error("cfg", FLUX, sheet=without_limits()).message


@pytest.mark.parametrize("option", [{"compile": True}, {"capture": True}, {"speed": "fast"}, {"speed": "draft"}])
def test_rank_local_options_raise(option: dict[str, Any]) -> None:
    assert "is not supported with parallel=" in expect_error("context", FLUX, **option).message


def test_split_weights_cannot_be_offloaded() -> None:
    assert "split weights cannot be offloaded" in expect_error("tensor", FLUX, memory="component").message
    assert choose("context", FLUX, memory="component").value == Split("context", 2)


@pytest.mark.parametrize(
    ("model", "ranks", "split"),
    [
        (FLUX, TWO, "context:2"),
        (FLUX, replace(TWO, fits_one_device=True), "context:2"),
        (FLUX, replace(TWO, fits_one_device=False), "tensor:2"),
        (FLUX, Ranks(count=2, fits_one_device=False), "context:2"),
        (WAN, replace(TWO, fits_one_device=False), "context:2"),
        (UNET, TWO, "cfg:2"),
        (UNET, Ranks(count=4), "-"),
        (FLUX, Ranks(count=1), "-"),
    ],
)
def test_auto_chooses_the_split(model: ComponentFacts, ranks: Ranks, split: str) -> None:
    chosen = choose("auto", model, ranks=ranks)
    assert str(chosen) == split
    assert chosen.reason


def test_auto_explains_rejected_splits() -> None:
    reason = choose("auto", UNET, ranks=Ranks(count=4)).reason
    assert "parallel='context' is not available: diffusers has no context-parallel plan for UNet" in reason
    assert (
        "parallel='cfg' is not available: guidance has two branches, one per process, but 4 processes are running"
        in reason
    )


def test_parameters_per_rank() -> None:
    assert count_rank_parameters(FLUX, Split("tensor", 4)) == 400 + 150
    assert count_rank_parameters(FLUX, Split("context", 4)) == 1_000
    assert count_rank_parameters(ENCODER, Split("tensor", 4)) == 50


@pytest.mark.parametrize("name", NAMES)
def test_plan_for_several_devices_neither_compiles_nor_captures(name: str) -> None:
    facts = PipelineFacts(pipeline="P", components=(FLUX,))
    plan = make_plan(
        real_sheet(name), facts, PlacementOptions(parallel="context:2"), device="d:0", ranks=Ranks(count=2)
    )
    assert str(plan.parallel) == "context:2"
    assert plan.compile_policy.value.when == "never"
    assert not plan.capture.value
    assert {"name": "parallel", "value": "context:2", "reason": plan.parallel.reason} in plan.to_dict()["decisions"]
