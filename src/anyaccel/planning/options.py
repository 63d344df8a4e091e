"""Wishes: what the user asked for, each with a default that means "decide for me"."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any

from anyaccel.errors import UsageError, nearest

__all__ = [
    "FLOATING_BYTES",
    "RESIDENCES",
    "SPEEDS",
    "PlacementOptions",
    "check_residence",
    "check_speed",
    "read_options",
    "read_parallel",
]

FLOATING_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""The types that a pipeline can run in, with the bytes of a number."""
RESIDENCES = ("resident", "component", "layer", "phase")

SPEEDS = ("exact", "fast", "draft")
_PARALLEL = re.compile(r"(?P<alone>auto|cfg)|(?P<way>tensor|context)(:(?P<ranks>[0-9]{1,4}))?")


@dataclass(frozen=True, kw_only=True)
class PlacementOptions:
    """Every keyword that `anyaccel.place` and `pipe.to` take beside the device."""

    dtype: str | None = None
    """The type to run in: `bfloat16`; None takes the device's best."""
    smallest_dtype: str | None = None
    """The type to fall back to where nothing else makes a call fit: `bfloat16`; None keeps the type."""
    attention_slicing: str | int | None = None
    """How many heads attend at once: a number, `auto` for half of them, `max` for one; None slices where it must."""
    images_per_call: int | None = None
    """How many images run in one call; None takes what the device does reliably."""
    mode: str | None = None
    """How the device executes, where it has several ways: `eager`, `lazy`; None takes the sheet's first."""
    scheduler: str | None = None
    """Where the scheduler's numbers live, `host` or `device`; None decides by the cost of reading them back."""
    memory: str | None = None
    """Which weights are on the device: `resident` all, `component` the model's that runs, `layer` the layer's, `phase`
    those of the phase, read from disk; None takes the first that fits."""
    vae_tiling: bool | None = None
    """Whether the autoencoder takes its images one by one and large ones in tiles; None where it must."""
    speed: str = "exact"
    """`exact` for the same picture to rounding, `fast` and `draft` for what changes it a little, and more."""
    compile: str | bool = "auto"
    """Whether models are compiled: `auto` once that pays for the pictures to come, True at once, False never."""
    expected_images: int | None = None
    """How many pictures are to come, for `compile="auto"`; None takes as many as came already."""
    capture: bool | None = None
    """Whether the denoiser's work is recorded and replayed; None once it was compiled."""
    channels_last: bool | None = None
    """Whether compiled models keep pictures in memory channels last; None where that pays."""
    fuse: bool | None = None
    """Whether compiled models use fused operations; None where that pays."""
    parallel: str | None = None
    """How one model is split over several devices, a process each: `auto`, `tensor:2`, `context:4`, `cfg`; None for one
    device."""
    check_finite: bool = True
    """Whether a picture that is not finite is found, traced and tried again."""
    sdp_on_bf16: bool = True
    """Whether attention may reduce in bfloat16 where the device would fall back to float32."""
    hpu_migration: bool = True
    """Whether the vendor's own switch that maps CUDA calls to the device is set."""


def read_options(asked: dict[str, Any], before: PlacementOptions | None = None) -> PlacementOptions:
    """Wishes from keywords, added to earlier ones; a keyword that is none of them is an error with the nearest name."""
    known = [field.name for field in fields(PlacementOptions)]
    for name in asked:
        if name not in known:
            raise UsageError(f"unknown option {name!r}", hint=nearest(name, known))
    options = replace(before or PlacementOptions(), **asked)
    _check(options)
    return options


def check_residence(memory: str | None, *, unified_memory: bool) -> None:
    """Raise if weights were asked to wait on the host of a device that shares its memory, where that frees nothing."""
    if memory == "component" and unified_memory:
        raise UsageError(
            "memory='component' was asked for, and this device shares the host's memory: a model that waits on the "
            "host takes as much of it",
            hint="ask for memory='phase', which reads the models of each phase from disk, or leave it out",
        )


def check_speed(speed: str) -> None:
    """Raise if a level is none."""
    if speed not in SPEEDS:
        raise UsageError(f"speed is one of {', '.join(SPEEDS)}, not {speed!r}", hint=nearest(str(speed), list(SPEEDS)))


def read_parallel(text: str) -> tuple[str, int | None]:
    """`("context", 4)` for `context:4`; no number means as many processes as there are."""
    match = _PARALLEL.fullmatch(text) if isinstance(text, str) else None
    ranks = match["ranks"] if match else None
    if match is None or (ranks is not None and int(ranks) < 2):
        raise UsageError(
            f"parallel is auto, tensor:N, context:N or cfg, N from 2 up, not {text!r}", hint="for example context:2"
        )
    return match["alone"] or match["way"], int(ranks) if ranks else None


def _check(options: PlacementOptions) -> None:
    slicing = options.attention_slicing
    if isinstance(slicing, str) and slicing not in ("auto", "max"):
        raise UsageError(
            f"attention_slicing is a number of heads, 'auto' or 'max', not {slicing!r}", hint="leave it out"
        )
    for name in ("attention_slicing", "images_per_call", "expected_images"):
        number = getattr(options, name)
        if number is None or (name == "attention_slicing" and isinstance(number, str)):
            continue
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise UsageError(f"{name} is a whole number from 1 up, not {number!r}", hint=f"for example {name}=1")
    _check_switches(options)
    _check_types(options)
    if options.memory not in (None, *RESIDENCES):
        raise UsageError(f"memory is one of {', '.join(RESIDENCES)}, not {options.memory!r}", hint="leave it out")
    if not isinstance(options.compile, bool) and options.compile != "auto":
        raise UsageError(f"compile is 'auto', True or False, not {options.compile!r}", hint="leave it out")
    check_speed(options.speed)
    if options.parallel is not None:
        read_parallel(options.parallel)
    if options.scheduler not in (None, "cpu", "device"):
        raise UsageError(f"scheduler is 'cpu' or 'device', not {options.scheduler!r}", hint="leave it out")


def _check_switches(options: PlacementOptions) -> None:
    for field in fields(options):
        switch = getattr(options, field.name)
        open_too = field.type == "bool | None" and switch is None
        if field.type in ("bool", "bool | None") and not isinstance(switch, bool) and not open_too:
            raise UsageError(f"{field.name} is True or False, not {switch!r}", hint="leave it out")


def _check_types(options: PlacementOptions) -> None:
    for name in ("dtype", "smallest_dtype"):
        asked = getattr(options, name)
        if asked not in (None, *FLOATING_BYTES):
            names = ", ".join(FLOATING_BYTES)
            raise UsageError(f"a pipeline runs in {names}: {name} is one of them, not {asked!r}", hint="leave it out")
