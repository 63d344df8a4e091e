"""What is done for speed: by the sheet, switched off by a word, and compiled when that pays."""

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

KNOWN: dict[str, Any] = {"says": "It pays.", "source": "https://example.org", "evidence": "documented"}
FAST = without_limits(
    compiler=Compiler(backend="b", dynamic=True, fullgraph=False, **KNOWN),
    speedups=tuple(
        Speedup(name=name, gain=2.0, **KNOWN) for name in ("compile", "capture", "channels_last", "group_norm")
    ),
)
DENOISER = ComponentFacts(name="transformer", kind="T", dtype="bfloat16", parameters=9, denoises=True, blocks=57)
UNET = ComponentFacts(
    name="unet", kind="U", dtype="bfloat16", parameters=9, denoises=True, blocks=16, convolutions=60
)  # fmt: skip


def facts(*components: ComponentFacts) -> PipelineFacts:
    return PipelineFacts(pipeline="P", components=components)


def test_what_the_sheet_names_is_done_with_its_source() -> None:
    for chosen in (choose_capture(FAST, PlacementOptions()), choose_channels_last(FAST, PlacementOptions())):
        assert chosen.value
        assert chosen.reason == "It pays. (https://example.org)"
    assert choose_fusions(FAST, PlacementOptions()).value == ("group_norm",)


@pytest.mark.parametrize("wish", ["capture", "channels_last", "fuse", "compile"])
def test_each_can_be_switched_off(wish: str) -> None:
    off: dict[str, Any] = {wish: False}
    options = PlacementOptions(**off)
    choosers: dict[str, Any] = {
        "capture": choose_capture,
        "channels_last": choose_channels_last,
        "fuse": choose_fusions,
        "compile": lambda sheet, options: choose_compile_policy(sheet, facts(DENOISER), options),
    }
    chosen = choosers[wish](FAST, options)
    assert not chosen.value or chosen.value == CompilePolicy("never")
    assert f"{wish}=False was asked for" in chosen.reason


def test_nothing_is_done_where_nobody_knows_that_it_pays() -> None:
    sheet = without_limits()
    assert not choose_capture(sheet, PlacementOptions()).value
    assert not choose_channels_last(sheet, PlacementOptions()).value
    assert choose_fusions(sheet, PlacementOptions()).value == ()
    assert choose_compile_policy(sheet, facts(DENOISER), PlacementOptions()).value.when == "never"
    for name in NAMES:
        assert choose_compile_policy(real_sheet(name), facts(DENOISER), PlacementOptions()).reason


def test_blocks_are_compiled_alone_where_a_model_is_made_of_them() -> None:
    few = choose_compile_policy(FAST, facts(DENOISER), PlacementOptions()).value
    many = choose_compile_policy(FAST, facts(DENOISER), PlacementOptions(expected_images=100_000)).value
    assert (few.region, many.region) == ("blocks", "whole")
    assert few.takes_s < many.takes_s
    assert choose_compile_policy(FAST, facts(UNET), PlacementOptions()).value.region == "whole", (
        "convolutions stand between them"
    )
    repaired = choose_compile_policy(FAST, facts(DENOISER), PlacementOptions(), ("zero_empty",))
    assert repaired.value.region == "whole", "repairs are made in the graph"


def test_it_pays_once_as_much_was_spent_as_it_would_have_saved() -> None:
    compiling = CompilePolicy("when it pays", "blocks", takes_s=20, gain=2.0)
    assert not is_worth_compiling(compiling, seconds_a_picture=1.0, done=39, pictures=None)
    assert is_worth_compiling(compiling, seconds_a_picture=1.0, done=40, pictures=None)


def test_a_told_number_of_pictures_counts_from_the_second_on() -> None:
    compiling = CompilePolicy("when it pays", "blocks", takes_s=20, gain=2.0)
    assert is_worth_compiling(compiling, seconds_a_picture=1.0, done=1, pictures=1000)
    assert not is_worth_compiling(compiling, seconds_a_picture=1.0, done=1, pictures=10)
    assert not is_worth_compiling(compiling, seconds_a_picture=0.0, done=0, pictures=1000), "a picture is timed first"


def test_asked_for_is_now_and_never_is_never() -> None:
    now = choose_compile_policy(FAST, facts(DENOISER), PlacementOptions(compile=True)).value
    assert is_worth_compiling(now, 0.0, 0, None)
    assert not is_worth_compiling(CompilePolicy("never"), 100.0, 100, 10**6)
