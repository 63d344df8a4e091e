"""Plans: decisions with reasons, as plain data, without importing torch."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields

import pytest

from anyaccel.planning import ComponentFacts, Decision, PipelineFacts, PlacementOptions, Plan, make_plan
from tests.planning.sheets import NAMES, quirk, real_sheet, size_limit, without_limits

FACTS = PipelineFacts(
    pipeline="StableDiffusionPipeline",
    components=(
        ComponentFacts(name="unet", kind="UNet2DConditionModel", dtype="float32", parameters=10, denoises=True),
        ComponentFacts(name="vae", kind="AutoencoderKL", dtype="float32", parameters=5),
    ),
)


def plan_on(name: str, **options: object) -> Plan:
    return make_plan(real_sheet(name), FACTS, PlacementOptions(**options), device=f"{name}:0")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_every_decision_has_a_reason_and_the_plan_is_plain_data(name: str) -> None:
    plan = plan_on(name)
    decisions = dict(plan.decisions())
    assert len(decisions) == sum(isinstance(getattr(plan, field.name), Decision) for field in fields(plan)) > 10
    assert all(decision.reason for decision in decisions.values())
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert hash(plan) == hash(plan_on(name))
    assert json.loads(json.dumps(plan.to_dict()))["device"] == f"{name}:0"
    assert {entry["name"] for entry in plan.to_dict()["decisions"]} == set(decisions)
    text = str(plan)
    assert text.startswith(f"StableDiffusionPipeline on {name}:0: {real_sheet(name).title}")
    assert all(f"  {name_of} " in text for name_of in decisions)
    assert "Decision(" not in text
    assert "AttentionRule(" not in text
    assert "virtual" not in text.splitlines()[0]
    with pytest.raises(FrozenInstanceError):
        plan.device = "other"  # type: ignore[misc]


def test_same_input_gives_the_same_plan() -> None:
    assert plan_on("neuron") == plan_on("neuron")
    assert plan_on("neuron") != plan_on("neuron", dtype="float32")


def test_plan_marks_a_virtual_device() -> None:
    plan = make_plan(real_sheet("hpu"), FACTS, PlacementOptions(), device="hpu:0", virtual=True)
    assert "(virtual)" in str(plan).splitlines()[0]
    assert plan.to_dict()["virtual"] is True


def test_attention_limit_in_bytes_depends_on_the_dtype() -> None:
    sheet = without_limits(largest_tensor=(size_limit(2**32, "bytes", "tensor"),))
    for dtype, scores in (("float16", 2**30), ("bfloat16", 2**30), ("float32", 2**29), ("float64", 2**28)):
        plan = make_plan(sheet, FACTS, PlacementOptions(dtype=dtype), device="best:0")
        assert plan.attention.value.max_scores == scores, dtype
        assert plan.workarounds.value == ("attention",)


def test_bf16_attention_needs_the_quirk_and_bfloat16() -> None:
    sheet = without_limits(quirks=(quirk("float32_attention", says="Slow in float32."),))

    def chosen(**options: object) -> Decision[bool]:
        return make_plan(sheet, FACTS, PlacementOptions(**options), device="best:0").bf16_attention  # type: ignore[arg-type]

    assert chosen(dtype="bfloat16") == Decision(True, "Slow in float32.")
    assert not chosen(dtype="bfloat16", sdp_on_bf16=False).value
    assert not chosen(dtype="float32").value
    assert not make_plan(without_limits(), FACTS, PlacementOptions(), device="best:0").bf16_attention.value


def test_denoisers_of_a_pipeline() -> None:
    assert FACTS.denoisers == ("unet",)
    assert FACTS.denoiser_dtypes == {"float32"}
    without = PipelineFacts(pipeline="Test", components=FACTS.components[1:])
    assert without.denoisers == ()
    assert without.denoiser_dtypes == {"float32"}


def test_planning_imports_no_torch() -> None:
    """Checked in a new process, for every device, including the printed plan."""
    program = f"""
import sys
import anyaccel
from anyaccel.planning import PipelineFacts, PlacementOptions, make_plan
import anyaccel.planning.options
for name in {NAMES!r}:
    sheet = anyaccel.sheet(name).on(versions=dict(torch="2.13.0", macos="15.0"))
    str(make_plan(sheet, PipelineFacts(pipeline="Test"), PlacementOptions(), device=name))
heavy = set("torch diffusers transformers accelerate numpy".split()) & set(sys.modules)
sys.exit(", ".join(heavy) or 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
