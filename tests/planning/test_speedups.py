"""Speedups: enabled by the sheet, disabled by an option; compilation when it pays off."""

from typing import Any

import pytest

from anyaccel.backends.sheet import Compiler, Speedup
from anyaccel.planning import PlacementOptions
from anyaccel.planning.facts import ComponentFacts, PipelineFacts
from anyaccel.planning.speedups import (
    CompilePolicy,
    choose_capture,
    choose_channels_last,
    choose_compile_policy,
    choose_fusions,
    is_worth_compiling,
)
from tests.planning.sheets import NAMES, real_sheet, without_limits

CLAIM: dict[str, Any] = {"says": "It is faster.", "source": "https://example.org", "evidence": "documented"}
FAST = without_limits(
    compiler=Compiler(backend="b", dynamic=True, fullgraph=False, **CLAIM),
    speedups=tuple(
        Speedup(name=name, gain=2.0, **CLAIM) for name in ("compile", "capture", "channels_last", "group_norm")
    ),
)
DENOISER = ComponentFacts(name="transformer", kind="T", dtype="bfloat16", parameters=9, denoises=True, blocks=57)
UNET = ComponentFacts(
    name="unet", kind="U", dtype="bfloat16", parameters=9, denoises=True, blocks=16, convolutions=60
)  # fmt: skip


def facts(*components: ComponentFacts) -> PipelineFacts:
    return PipelineFacts(pipeline="P", components=components)


def test_speedups_of_the_sheet_are_chosen_with_their_source() -> None:
    for chosen in (choose_capture(FAST, PlacementOptions()), choose_channels_last(FAST, PlacementOptions())):
        assert chosen.value
        assert chosen.reason == "It is faster (https://example.org)"
    assert choose_fusions(FAST, PlacementOptions()).value == ("group_norm",)


@pytest.mark.parametrize("option", ["capture", "channels_last", "fuse", "compile"])
def test_each_speedup_can_be_turned_off(option: str) -> None:
    off: dict[str, Any] = {option: False}
    options = PlacementOptions(**off)
    choosers: dict[str, Any] = {
        "capture": choose_capture,
        "channels_last": choose_channels_last,
        "fuse": choose_fusions,
        "compile": lambda sheet, options: choose_compile_policy(sheet, facts(DENOISER), options),
    }
    chosen = choosers[option](FAST, options)
    assert not chosen.value or chosen.value == CompilePolicy("never")
    assert f"{option}=False was requested" in chosen.reason


def test_no_speedup_is_chosen_without_evidence() -> None:
    sheet = without_limits()
    assert not choose_capture(sheet, PlacementOptions()).value
    assert not choose_channels_last(sheet, PlacementOptions()).value
    assert choose_fusions(sheet, PlacementOptions()).value == ()
    assert choose_compile_policy(sheet, facts(DENOISER), PlacementOptions()).value.when == "never"
    for name in NAMES:
        assert choose_compile_policy(real_sheet(name), facts(DENOISER), PlacementOptions()).reason


def test_only_blocks_are_compiled_if_the_model_consists_of_them() -> None:
    few = choose_compile_policy(FAST, facts(DENOISER), PlacementOptions()).value
    many = choose_compile_policy(FAST, facts(DENOISER), PlacementOptions(expected_images=100_000)).value
    assert (few.region, many.region) == ("blocks", "whole")
    assert few.compile_s < many.compile_s
    assert choose_compile_policy(FAST, facts(UNET), PlacementOptions()).value.region == "whole", (
        "most of the time is spent in convolutions between the blocks"
    )
    worked_around = choose_compile_policy(FAST, facts(DENOISER), PlacementOptions(), ("zero_empty",))
    assert worked_around.value.region == "whole", "workarounds are applied to the whole graph"


def test_compiling_pays_off_once_the_past_images_would_have_saved_its_time() -> None:
    policy = CompilePolicy("when it pays off", "blocks", compile_s=20, gain=2.0)
    assert not is_worth_compiling(policy, seconds_per_image=1.0, done=39, expected=None)
    assert is_worth_compiling(policy, seconds_per_image=1.0, done=40, expected=None)


def test_expected_images_count_from_the_second_image_on() -> None:
    policy = CompilePolicy("when it pays off", "blocks", compile_s=20, gain=2.0)
    assert is_worth_compiling(policy, seconds_per_image=1.0, done=1, expected=1000)
    assert not is_worth_compiling(policy, seconds_per_image=1.0, done=1, expected=10)
    assert not is_worth_compiling(policy, seconds_per_image=0.0, done=0, expected=1000), (
        "the first image must be timed before compiling"
    )


def test_compile_true_compiles_at_once_and_never_means_never() -> None:
    now = choose_compile_policy(FAST, facts(DENOISER), PlacementOptions(compile=True)).value
    assert is_worth_compiling(now, 0.0, 0, None)
    assert not is_worth_compiling(CompilePolicy("never"), 100.0, 100, 10**6)
