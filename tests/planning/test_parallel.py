"""How one model is split over several devices: by its kind, the device and the count of processes."""

from dataclasses import replace
from typing import Any

import pytest

from anyaccel.backends.sheet import Distributed
from anyaccel.errors import UsageError
from anyaccel.planning import PlacementOptions
from anyaccel.planning.facts import ComponentFacts, PipelineFacts
from anyaccel.planning.options import read_options, read_parallel
from anyaccel.planning.parallel import Ranks, Split, choose_parallel, weigh_rank
from anyaccel.planning.plan import make_plan
from tests.planning.sheets import NAMES, real_sheet, without_limits

KNOWN: dict[str, Any] = {"says": "It says so.", "source": "https://example.org", "evidence": "documented"}
SHEET = without_limits(distributed=Distributed(backend="b", **KNOWN))
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


def refusal(*args: Any, **options: Any) -> UsageError:
    with pytest.raises(UsageError) as raised:
        choose(*args, **options)
    return raised.value


@pytest.mark.parametrize(
    ("text", "read"),
    [("auto", ("auto", None)), ("cfg", ("cfg", None)), ("tensor:2", ("tensor", 2)), ("context", ("context", None))],
)
def test_spellings(text: str, read: tuple[str, int | None]) -> None:
    assert read_parallel(text) == read


@pytest.mark.parametrize(
    "text", ["", "tensor:1", "tensor:0", "context:", "context:x", "cfg:3", "ring:2", "Auto", 2, True]
)
def test_other_spellings_are_refused(text: Any) -> None:
    with pytest.raises(UsageError, match="parallel is auto, tensor:N, context:N or cfg"):
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
def test_what_is_asked_for_is_done(text: str, split: str) -> None:
    assert str(choose(text, FLUX)) == split


def test_the_reason_says_what_it_buys() -> None:
    assert "of transformer's 1,000 weights a rank holds 700" in choose("tensor", FLUX).reason
    assert "a rank takes 1/2 of the sequence" in choose("context", FLUX).reason


@pytest.mark.parametrize("text", ["context:2", "tensor", "cfg"])
def test_one_process_is_too_few(text: str) -> None:
    error = refusal(text, FLUX, ranks=Ranks())
    assert "takes 2 processes, a device each, and there is one" in error.message
    assert error.hint == "start the program with torchrun --nproc-per-node 2 program.py"


def test_the_count_is_that_of_the_processes() -> None:
    error = refusal("context:4", FLUX)
    assert "takes 4 processes, a device each, and there are 2" in error.message
    assert "--nproc-per-node 4" in error.hint
    assert "--nproc-per-node 2" in refusal("cfg", FLUX, ranks=Ranks(count=4)).hint


@pytest.mark.parametrize(
    ("text", "model", "words", "hint"),
    [
        ("tensor", WAN, "no tensor-parallel plan for Wan", "parallel='context'"),
        ("context", UNET, "no context-parallel plan for UNet", "parallel='cfg'"),
        ("tensor", replace(FLUX, quantized=True), "are quantized", "load the model as it is"),
        ("context", replace(FLUX, kind="LTXVideoTransformer3DModel"), "its masks have a row for each head", "auto"),
    ],
)
def test_a_model_that_cannot_be_split_so(text: str, model: ComponentFacts, words: str, hint: str) -> None:
    error = refusal(text, model)
    assert words in error.message
    assert hint in error.hint


def test_heads_are_shared_out_evenly() -> None:
    error = refusal("context", replace(FLUX, heads=30), ranks=Ranks(count=8))
    assert "the 30 attention heads of Flux cannot be shared out to 8" in error.message
    assert error.hint == "parallel='context:6'"


def test_every_model_that_runs_at_each_step_must_have_a_plan() -> None:
    control = replace(UNET, name="controlnet", kind="FluxControlNetModel")
    assert "FluxControlNetModel" in refusal("context", FLUX, control).message
    assert "no model that runs at every step" in refusal("context").message


def test_a_device_on_which_diffusers_splits_no_weights() -> None:
    error = refusal("tensor", FLUX, ranks=Ranks(count=2, tensor_types=("other",)))
    assert "diffusers splits weights on other, and not on best" in error.message
    assert "context" in error.hint


def test_a_device_without_a_known_backend() -> None:
    assert "no backend of torch.distributed is known" in refusal("cfg", FLUX, sheet=without_limits()).message


@pytest.mark.parametrize("wish", [{"compile": True}, {"capture": True}, {"speed": "fast"}, {"speed": "draft"}])
def test_what_ranks_would_do_apart_is_refused(wish: dict[str, Any]) -> None:
    assert "is not done on several devices" in refusal("context", FLUX, **wish).message


def test_split_weights_stay() -> None:
    assert "moves weights" in refusal("tensor", FLUX, memory="component").message
    assert choose("context", FLUX, memory="component").value == Split("context", 2)


@pytest.mark.parametrize(
    ("model", "ranks", "split"),
    [
        (FLUX, TWO, "context:2"),
        (FLUX, replace(TWO, fits_alone=True), "context:2"),
        (FLUX, replace(TWO, fits_alone=False), "tensor:2"),
        (FLUX, Ranks(count=2, fits_alone=False), "context:2"),
        (WAN, replace(TWO, fits_alone=False), "context:2"),
        (UNET, TWO, "cfg:2"),
        (UNET, Ranks(count=4), "-"),
        (FLUX, Ranks(count=1), "-"),
    ],
)
def test_auto(model: ComponentFacts, ranks: Ranks, split: str) -> None:
    chosen = choose("auto", model, ranks=ranks)
    assert str(chosen) == split
    assert chosen.reason


def test_auto_says_why_not() -> None:
    reason = choose("auto", UNET, ranks=Ranks(count=4)).reason
    assert "no context: diffusers has no context-parallel plan for UNet" in reason
    assert "no cfg: guidance has two halves, and there are 4 processes" in reason


def test_what_a_rank_holds() -> None:
    assert weigh_rank(FLUX, Split("tensor", 4)) == 400 + 150
    assert weigh_rank(FLUX, Split("context", 4)) == 1_000
    assert weigh_rank(ENCODER, Split("tensor", 4)) == 50


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_for_several_devices_times_and_records_nothing(name: str) -> None:
    facts = PipelineFacts(pipeline="P", components=(FLUX,))
    plan = make_plan(
        real_sheet(name), facts, PlacementOptions(parallel="context:2"), device="d:0", ranks=Ranks(count=2)
    )
    assert str(plan.parallel) == "context:2"
    assert plan.compile_policy.value.when == "never"
    assert not plan.capture.value
    assert {"name": "parallel", "value": "context:2", "reason": plan.parallel.reason} in plan.to_dict()["decisions"]
