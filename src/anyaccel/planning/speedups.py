"""Speedups that change images only by rounding error, and the decision of when to compile.

See docs/decisions/0007-speed.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from anyaccel.backends.sheet import Compiler, Sheet
from anyaccel.planning.decision import Decision, cite
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

# What is compiled: the repeated blocks (one compilation per kind), or the whole model as one graph.
Region: TypeAlias = Literal["blocks", "whole"]
FUSIONS = ("group_norm",)
# Compile time: fixed seconds, seconds per block of a whole model, and the block count assumed for other models.
# Fitted to 36 s for 25 blocks, 38 s for 28, 95 s for 57, and 23 s for one block of each kind, with 16 CPU cores.
_START_S, _BLOCK_S, _PLAIN_BLOCKS = 15.0, 1.4, 40
# From this many images on, the few percent that a whole graph gains over blocks repay one or two minutes.
_MANY_IMAGES = 2000


@dataclass(frozen=True)
class CompilePolicy:
    """A compile policy: when to compile, what to compile, and the expected compile time and speedup."""

    when: Literal["never", "now", "when it pays off"]
    region: Region = "whole"
    compile_s: float = 0.0
    """The expected compile time."""
    gain: float = 1.0
    """The expected speedup per image."""

    def __str__(self) -> str:
        if self.when == "never":
            return self.when
        region = "repeated blocks" if self.region == "blocks" else "whole models"
        return f"{self.when}, {region}"


def choose_compile_policy(
    sheet: Sheet, facts: PipelineFacts, options: PlacementOptions, workarounds: tuple[str, ...] = ()
) -> Decision[CompilePolicy]:
    """Return whether and when denoisers and decoders are compiled.

    On a device that needs workarounds, whole models are compiled, because the workarounds are applied
    to the graph (`runtime/speed/compiled_model_workarounds.py`). If a required workaround cannot be applied to
    the graph, compilation fails and the model runs eagerly.
    """
    speedup = sheet.speedup("compile")
    if options.compile is False:
        return Decision(CompilePolicy("never"), "compile=False was requested")
    if not isinstance(sheet.compiler, Compiler):
        return Decision(CompilePolicy("never"), sheet.compiler.says)
    # Compiling takes minutes on some devices, so "auto" needs a documented gain.
    if options.compile == "auto" and speedup is None:
        reason = "not known to be faster on this device; use compile=True to try it anyway"
        return Decision(CompilePolicy("never"), reason)
    many = options.expected_images is not None and options.expected_images >= _MANY_IMAGES
    blocks = [component.blocks for component in facts.components if component.denoises]
    only_blocks = bool(blocks) and all(_is_mostly_blocks(model) for model in facts.components if model.denoises)
    region: Region = "blocks" if only_blocks and not many and not workarounds else "whole"
    count = sum(blocks) or _PLAIN_BLOCKS
    takes = _START_S + (_BLOCK_S * count if region == "whole" else 0.0)
    gain = speedup.gain if speedup else 1.0
    effect = f"the models then run {gain:.2g} times as fast" if speedup else "the speedup on this device is not known"
    estimate = f"compiling takes about {takes:.0f} s; {effect}"
    source = f" ({speedup.source})" if speedup else ""
    if options.compile is True:
        return Decision(CompilePolicy("now", region, takes, gain), f"compile=True was requested; {estimate}{source}")
    return Decision(CompilePolicy("when it pays off", region, takes, gain), f"{estimate}{source}")


def _is_mostly_blocks(component: ComponentFacts) -> bool:
    """Return whether a model has more repeated blocks than convolutions.

    Such a model spends most of its time in the blocks, so only the blocks need to be compiled.
    """
    # A UNet has transformer blocks too, but spends its time in the convolutions between them.
    return component.blocks > component.convolutions


def is_worth_compiling(policy: CompilePolicy, seconds_per_image: float, done: int, expected: int | None) -> bool:
    """Return whether compiling would save more time on the remaining images than it takes.

    If `expected` is None, assume that as many images remain as have been generated.
    """
    if policy.when != "when it pays off":
        return policy.when == "now"
    # The ski rental rule: without a known count, expecting as many images as were generated so far costs at most
    # about twice the optimum.
    remaining = done if expected is None else max(0, expected - done)
    return remaining * seconds_per_image * (1 - 1 / policy.gain) >= policy.compile_s


def choose_channels_last(sheet: Sheet, options: PlacementOptions) -> Decision[bool]:
    """Return whether compiled models with convolutions use the channels-last memory format."""
    return _choose(sheet, "channels_last", options.channels_last)


def choose_capture(sheet: Sheet, options: PlacementOptions) -> Decision[bool]:
    """Return whether denoisers may be captured as device graphs (such as CUDA graphs) and replayed."""
    return _choose(sheet, "capture", options.capture)


def choose_fusions(sheet: Sheet, options: PlacementOptions) -> Decision[tuple[str, ...]]:
    """Return the names of the fused operations that compiled models use, such as `group_norm`."""
    if options.fuse is False:
        return Decision((), "fuse=False was requested")
    speedups = [speedup for name in FUSIONS if (speedup := sheet.speedup(name)) is not None]
    reason = "; ".join(cite(speedup) for speedup in speedups)
    return Decision(
        tuple(speedup.name for speedup in speedups), reason or "no fusion is known to be faster on this device"
    )


def _choose(sheet: Sheet, name: str, option: bool | None) -> Decision[bool]:
    speedup = sheet.speedup(name)
    if option is False:
        return Decision(False, f"{name}=False was requested")
    if speedup is None:
        return Decision(
            bool(option), f"{name}=True was requested" if option else "not known to be faster on this device"
        )
    return Decision(True, f"{name}=True was requested. {cite(speedup)}" if option else cite(speedup))
