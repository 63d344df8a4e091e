"""Wishes: what the user asked for, each with a default that means "decide for me"."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from anyaccel.errors import UsageError, nearest

__all__ = ["FLOATING_BYTES", "RESIDENCES", "Wishes", "read_wishes"]

FLOATING_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""The types that a pipeline can run in, with the bytes of a number."""
RESIDENCES = ("resident", "component", "layer", "phase")


@dataclass(frozen=True, kw_only=True)
class Wishes:
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
    schedule: str | None = None
    """Where the scheduler's numbers live, `host` or `device`; None decides by the cost of reading them back."""
    memory: str | None = None
    """Which weights are on the device: `resident` all, `component` the model's that runs, `layer` the layer's, `phase`
    those of the phase, read from disk; None takes the first that fits."""
    vae_tiling: bool | None = None
    """Whether the autoencoder takes its images one by one and large ones in tiles; None where it must."""
    watch: bool = True
    """Whether a picture that is not finite is found, traced and tried again."""
    sdp_on_bf16: bool = True
    """Whether attention may reduce in bfloat16 where the device would fall back to float32."""
    hpu_migration: bool = True
    """Whether the vendor's own switch that maps CUDA calls to the device is set."""


def read_wishes(asked: dict[str, Any], before: Wishes | None = None) -> Wishes:
    """Wishes from keywords, added to earlier ones; a keyword that is none of them is an error with the nearest name."""
    known = [field.name for field in fields(Wishes)]
    for name in asked:
        if name not in known:
            raise UsageError(f"there is no wish {name!r}", hint=nearest(name, known))
    wishes = replace(before or Wishes(), **asked)
    _check(wishes)
    return wishes


def _check(wishes: Wishes) -> None:
    slicing = wishes.attention_slicing
    if isinstance(slicing, str) and slicing not in ("auto", "max"):
        raise UsageError(
            f"attention_slicing is a number of heads, 'auto' or 'max', not {slicing!r}", hint="leave it out"
        )
    for name in ("attention_slicing", "images_per_call"):
        number = getattr(wishes, name)
        if number is None or (name == "attention_slicing" and isinstance(number, str)):
            continue
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise UsageError(f"{name} is a whole number from 1 up, not {number!r}", hint=f"for example {name}=1")
    if wishes.smallest_dtype not in (None, *FLOATING_BYTES):
        names = ", ".join(FLOATING_BYTES)
        raise UsageError(f"smallest_dtype is one of {names}, not {wishes.smallest_dtype!r}", hint="leave it out")
    if wishes.memory not in (None, *RESIDENCES):
        raise UsageError(f"memory is one of {', '.join(RESIDENCES)}, not {wishes.memory!r}", hint="leave it out")
    if wishes.schedule not in (None, "host", "device"):
        raise UsageError(f"schedule is 'host' or 'device', not {wishes.schedule!r}", hint="leave it out")
