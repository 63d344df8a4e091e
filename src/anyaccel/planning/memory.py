"""Whether a pipeline fits, and the cheapest way in which it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from anyaccel.planning.decision import Decision
from anyaccel.planning.footprint import PHASES, Footprint, Model, Phase

__all__ = ["MemoryRule", "Residence", "choose_memory", "list_rules", "predict"]

Residence: TypeAlias = Literal["resident", "component", "layer", "phase"]
"""What of the weights is on the device: all; the component that runs; the layer that runs; those of the phase that runs,
read from disk again when its turn comes."""

_RESERVE = 0.03
"""A part of the capacity that is left free: allocators cannot use the last of it."""


@dataclass(frozen=True)
class MemoryRule:
    """One way to run a pipeline in less memory."""

    tiled: bool = False
    """Whether pictures are decoded in tiles, one image at a time."""
    sliced: bool = False
    """Whether attention runs a head at a time."""
    residence: Residence = "resident"
    images_per_call: int | None = None
    """How many images of a batch run at once; None for all."""

    def __str__(self) -> str:
        words = {
            "resident": "everything resident",
            "component": "a component at a time",
            "layer": "a layer at a time",
            "phase": "a phase at a time, read from disk",
        }
        parts = [words[self.residence]]
        parts += ["VAE in tiles"] if self.tiled else []
        parts += ["attention in slices"] if self.sliced else []
        parts += [f"{self.images_per_call} images a call"] if self.images_per_call else []
        return ", ".join(parts)


def list_rules(footprint: Footprint, unified_memory: bool) -> Iterator[MemoryRule]:
    """Every way, the cheapest in time first: each step is taken beside those before it."""
    rule = MemoryRule()
    yield rule
    if any(model.held_tiled_bytes is not None for model in footprint.models):
        rule = replace(rule, tiled=True)
        yield rule
    if any(model.held_sliced_bytes is not None for model in footprint.models):
        rule = replace(rule, sliced=True)
        yield rule
    if unified_memory:  # moving to the host frees nothing there
        rule = replace(rule, residence="phase")
        yield rule
    else:
        rule = replace(rule, residence="component")
        yield rule
    images = footprint.batch
    while images > 1:
        images = (images + 1) // 2
        yield replace(rule, images_per_call=images)
    if not unified_memory:
        yield replace(rule, residence="layer", images_per_call=1 if footprint.batch > 1 else None)


def predict(footprint: Footprint, rule: MemoryRule) -> dict[str, int]:
    """The bytes at the peak of each phase: `load`, `encode`, `denoise`, `decode`."""
    peaks = {phase: _peak(footprint, rule, phase) for phase in PHASES if footprint.of(phase)}
    loaded = footprint.weights_bytes if rule.residence == "resident" else 0
    return {"load": loaded, **peaks}


def choose_memory(footprint: Footprint, capacity_bytes: int, *, unified_memory: bool) -> Decision[MemoryRule | None]:
    """The first way that fits, or None where none does."""
    room = int(capacity_bytes * (1 - _RESERVE))
    last = ""
    for rule in list_rules(footprint, unified_memory):
        need = max(predict(footprint, rule).values())
        if need <= room:
            why = f"needs {_gib(need)} of {_gib(capacity_bytes)}"
            return Decision(rule, f"{why}; {last}" if last else why)
        last = f"{rule} would need {_gib(need)}"
    return Decision(None, f"{last}, and there are {_gib(capacity_bytes)}")


def _peak(footprint: Footprint, rule: MemoryRule, phase: Phase) -> int:
    models = footprint.of(phase)
    weights = {
        "resident": footprint.weights_bytes,
        "phase": sum(model.weights_bytes for model in models),
        "component": 0,
        "layer": 0,
    }[rule.residence]
    return footprint.between_bytes + weights + max(_need(model, footprint, rule) for model in models)


def _need(model: Model, footprint: Footprint, rule: MemoryRule) -> int:
    own = {"component": model.weights_bytes, "layer": model.largest_layer_bytes}.get(rule.residence, 0)
    return own + _held(model, footprint.batch, rule)


def _held(model: Model, batch: int, rule: MemoryRule) -> int:
    if rule.tiled and model.held_tiled_bytes is not None:
        return model.held_tiled_bytes
    whole = model.held_sliced_bytes if rule.sliced and model.held_sliced_bytes is not None else model.held_bytes
    if rule.images_per_call is None or batch == 1:
        return whole
    share = whole - (model.held_bytes - model.held_alone_bytes) * (batch - rule.images_per_call) // (batch - 1)
    return max(share, 0)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
