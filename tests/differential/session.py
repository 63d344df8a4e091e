"""Runs of a usage with stock diffusers and with a placed pipeline, and their comparison."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

import anyaccel
from anyaccel.emulator.run_forked import run_forked
from anyaccel.processes.forked_call import call_in_fork
from anyaccel.recipes import recipes
from anyaccel.recipes.recipe import _as_array

__all__ = ["USAGES", "VARIANTS", "Observation", "Session", "Usage", "Variant", "observe", "usage"]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to place the pipelines of a usage."""

    name: str
    device: str = "cpu"
    """Device name; any name except `cpu` is a virtual device."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options for `anyaccel.place`."""
    tolerance: float = 0.0
    """Largest allowed difference from stock diffusers; 0 compares bits."""


VARIANTS = {variant.name: variant for variant in (Variant(name="cpu"),)}


class Session:
    """Creates the pipelines of a usage: stock ones, or placed ones for a variant."""

    def __init__(self, variant: Variant | None) -> None:
        self.variant = variant
        self.device = "cpu" if variant is None else variant.device

    @property
    def placed(self) -> bool:
        """Whether pipelines are placed by anyaccel."""
        return self.variant is not None

    def place(self, pipe: Any, **options: Any) -> Any:
        """Place a pipeline on the variant's device, or return it unchanged with stock diffusers."""
        if self.variant is None:
            return pipe
        return anyaccel.place(pipe, self.variant.device, dtype="float32", **{**self.variant.options, **options})

    def make(self, name: str = "stable-diffusion", *, place: bool = True) -> Any:
        """Return a tiny pipeline, placed unless `place` is false."""
        pipe: Any = recipes()[name].make()
        return self.place(pipe) if place else pipe

    def arguments(self, name: str = "stable-diffusion", **changes: Any) -> dict[str, Any]:
        """Return the call arguments of a recipe with changes; None removes an argument."""
        call = {**recipes()[name].call(), **changes}
        return {key: value for key, value in call.items() if value is not None}

    def run(self, pipe: Any, name: str = "stable-diffusion", **changes: Any) -> Any:
        """Call a pipeline with its recipe's arguments and return the output as an array."""
        output = pipe(**self.arguments(name, **changes))
        values = output.to_tuple() if hasattr(output, "to_tuple") else output
        return as_array(next(value for value in values if value is not None) if isinstance(values, tuple) else values)


def as_array(value: Any) -> Any:
    """Convert tensors, images and nested lists of them to a float32 array."""
    return _as_array(value)


@dataclass(frozen=True)
class Observation:
    """Everything that a usage produced."""

    values: dict[str, Any]
    warnings: tuple[str, ...]
    error: str
    error_types: tuple[str, ...]
    """Names of the error's class and its base classes."""
    rng_state: bytes
    """State of the global CPU generator afterwards."""


Run = Callable[[Session], Any]


@dataclass(frozen=True, kw_only=True)
class Usage:
    """One way to use a diffusers pipeline."""

    name: str
    group: str
    run: Run
    """Returns a value or a dict of values to compare."""
    rejected: str = ""
    """Part of the error message, if a placed pipeline does not support this usage."""
    skip: dict[str, str] = field(default_factory=dict)
    """Variants that do not apply, with the reason."""
    tolerance: float = 0.0
    """Largest allowed difference, if it is larger than that of the variant."""


USAGES: dict[str, Usage] = {}


def usage(
    group: str, *, rejected: str = "", skip: dict[str, str] | None = None, tolerance: float = 0.0
) -> Callable[[Run], Run]:
    """Register a function as a usage; its docstring describes it."""

    def add(run: Run) -> Run:
        name = run.__name__  # type: ignore[attr-defined]
        assert name not in USAGES, name
        USAGES[name] = Usage(name=name, group=group, run=run, rejected=rejected, skip=skip or {}, tolerance=tolerance)
        return run

    return add


def observe(target: Usage, variant: Variant | None) -> Observation:
    """Run a usage in a forked process and return what it produced."""

    def run() -> Observation:
        torch.manual_seed(0)
        values: Any = {}
        error = ""
        error_types: tuple[str, ...] = ()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                values = target.run(Session(variant))
            except Exception as raised:  # noqa: BLE001 - errors are compared too
                error = f"{type(raised).__name__}: {raised}"
                error_types = tuple(kind.__name__ for kind in type(raised).__mro__)
        named = values if isinstance(values, dict) else {"result": values}
        texts = tuple(sorted({f"{entry.category.__name__}: {entry.message}" for entry in caught}))
        state = torch.default_generator.get_state().numpy().tobytes()
        return Observation({key: _freeze(value) for key, value in named.items()}, texts, error, error_types, state)

    if variant is None or variant.device == "cpu":
        return call_in_fork(run, name=target.name, timeout_s=300)
    return run_forked(variant.device, lambda _: run(), timeout_s=300)


def _freeze(value: Any) -> Any:
    """Return a value that can be compared and sent to another process."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy()
    if isinstance(value, numpy.ndarray | str | int | float | bool | type(None) | bytes):
        return value
    if isinstance(value, list | tuple) and all(isinstance(entry, str | int | float | bool) for entry in value):
        return tuple(value)
    return as_array(value)


def find_differences(expected: Observation, actual: Observation, tolerance: float) -> list[str]:
    """Return one line per difference between two observations."""
    lines = []
    # A subclass of the same exception may have another message.
    if expected.error_types[:1] != actual.error_types[:1] and not set(expected.error_types[:1]) & set(
        actual.error_types
    ):
        lines.append(f"error: {expected.error or 'none'} != {actual.error or 'none'}")
        return lines
    if expected.values.keys() != actual.values.keys():
        lines.append(f"values: {sorted(expected.values)} != {sorted(actual.values)}")
    for name in expected.values.keys() & actual.values.keys():
        first, second = expected.values[name], actual.values[name]
        if isinstance(first, numpy.ndarray) and isinstance(second, numpy.ndarray):
            if first.shape != second.shape:
                lines.append(f"{name}: shape {first.shape} != {second.shape}")
                continue
            difference = float(numpy.abs(first.astype(float) - second.astype(float)).max(initial=0.0))
            if not difference <= tolerance:
                lines.append(f"{name}: differs by {difference:.2e}, {tolerance:.0e} allowed")
        elif first != second:
            lines.append(f"{name}: {first!r} != {second!r}")
    if expected.rng_state != actual.rng_state:
        lines.append("the state of the global generator differs")
    new = set(actual.warnings) - set(expected.warnings)
    missing = set(expected.warnings) - set(actual.warnings)
    lines += [f"additional warning: {text}" for text in sorted(new)]
    lines += [f"missing warning: {text}" for text in sorted(missing)]
    return lines
