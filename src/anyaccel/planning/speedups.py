"""What makes a pipeline faster and gives the same picture to rounding, and when compiling pays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from anyaccel.backends.sheet import Compiler, Sheet
from anyaccel.planning.decision import Decision
from anyaccel.planning.facts import ComponentFacts, PipelineFacts
from anyaccel.planning.options import PlacementOptions

__all__ = [
    "FUSIONS",
    "CompilePolicy",
    "Region",
    "choose_capture",
    "choose_channels_last",
    "choose_compile_policy",
    "choose_fusions",
    "is_worth_compiling",
]

Region: TypeAlias = Literal["blocks", "whole"]
"""What is compiled: one of the blocks that a model repeats, for all of them, or the model as one graph."""
FUSIONS = ("group_norm",)
_START_S, _BLOCK_S, _PLAIN_BLOCKS = 15.0, 1.4, 40
"""What compiling takes: to begin, and for each block of a whole model; and what a model without blocks counts as. From
36 s for 25 blocks, 38 s for 28 and 95 s for 57, and 23 s for one block of each kind, on a machine with 16 cores."""
_MANY = 2000
"""From so many pictures on, the last few hundredths that a whole graph gains over blocks are worth a minute or two."""


@dataclass(frozen=True)
class CompilePolicy:
    """When models are compiled, and how."""

    when: Literal["never", "now", "when it pays"]
    region: Region = "whole"
    takes_s: float = 0.0
    """What it is expected to take."""
    gain: float = 1.0
    """How many times as fast a picture is expected to be then."""

    def __str__(self) -> str:
        if self.when == "never":
            return self.when
        what = "one block for all of its kind" if self.region == "blocks" else "whole models"
        return f"{self.when}, {what}"


def choose_compile_policy(
    sheet: Sheet, facts: PipelineFacts, options: PlacementOptions, repairs: tuple[str, ...] = ()
) -> Decision[CompilePolicy]:
    """Return whether and when the models that take the time are compiled.

    A device that needs workarounds compiles whole models, because they are applied in the graph
    (`runtime/speed/graph_workarounds.py`). If one cannot be applied there, the device rejects the graph and the model
    runs eagerly.
    """
    speedup = sheet.speedup("compile")
    if options.compile is False:
        return Decision(CompilePolicy("never"), "compile=False was asked for")
    if not isinstance(sheet.compiler, Compiler):
        return Decision(CompilePolicy("never"), sheet.compiler.says)
    if options.compile == "auto" and speedup is None:
        return Decision(CompilePolicy("never"), "that it pays here is not known; compile=True does it")
    many = options.expected_images is not None and options.expected_images >= _MANY
    blocks = [component.blocks for component in facts.components if component.denoises]
    alone = bool(blocks) and all(_is_all_blocks(component) for component in facts.components if component.denoises)
    region: Region = "blocks" if alone and not many and not repairs else "whole"
    count = sum(blocks) or _PLAIN_BLOCKS
    takes = _START_S + (_BLOCK_S * count if region == "whole" else 0.0)
    gain = speedup.gain if speedup else 1.0
    said = f"about {takes:.0f} s, and then {gain:.2g} times as fast"
    source = f" ({speedup.source})" if speedup else ""
    if options.compile is True:
        return Decision(CompilePolicy("now", region, takes, gain), f"asked for; {said}{source}")
    return Decision(CompilePolicy("when it pays", region, takes, gain), f"{said}{source}")


def _is_all_blocks(component: ComponentFacts) -> bool:
    """Whether what takes the time of a model are blocks that it repeats: not where convolutions stand between them."""
    return component.blocks > component.convolutions


def is_worth_compiling(compiling: CompilePolicy, seconds_a_picture: float, done: int, pictures: int | None) -> bool:
    """Whether the pictures to come save more than compiling takes; untold, as many are to come as came already."""
    if compiling.when != "when it pays":
        return compiling.when == "now"
    to_come = done if pictures is None else max(0, pictures - done)
    return to_come * seconds_a_picture * (1 - 1 / compiling.gain) >= compiling.takes_s


def choose_channels_last(sheet: Sheet, options: PlacementOptions) -> Decision[bool]:
    """Whether compiled models with convolutions keep pictures in memory channels last."""
    return _choose(sheet, "channels_last", options.channels_last)


def choose_capture(sheet: Sheet, options: PlacementOptions) -> Decision[bool]:
    """Whether what a denoiser asks of the device may be recorded and replayed."""
    return _choose(sheet, "capture", options.capture)


def choose_fusions(sheet: Sheet, options: PlacementOptions) -> Decision[tuple[str, ...]]:
    """The operations that compiled models do as one."""
    if options.fuse is False:
        return Decision((), "fuse=False was asked for")
    known = [found for name in FUSIONS if (found := sheet.speedup(name)) is not None]
    reason = " ".join(f"{one.says} ({one.source})" for one in known)
    return Decision(tuple(one.name for one in known), reason or "none is known to pay here")


def _choose(sheet: Sheet, name: str, wish: bool | None) -> Decision[bool]:
    speedup = sheet.speedup(name)
    if wish is False:
        return Decision(False, f"{name}=False was asked for")
    if speedup is None:
        return Decision(bool(wish), "asked for" if wish else "that it pays here is not known")
    return Decision(True, f"{'asked for; ' if wish else ''}{speedup.says} ({speedup.source})")
