"""Observations of a usage, and their comparison."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

from anyaccel.emulator.run_forked import run_forked
from anyaccel.processes.forked_call import call_in_fork
from tests.differential.session import Session, Usage, Variant, as_array

__all__ = ["Comparison", "Observation", "compare", "observe", "observe_here"]


_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class Observation:
    """Everything that a usage produced."""

    values: dict[str, Any]
    warnings: tuple[str, ...]
    error: str
    error_types: tuple[str, ...]
    """Names of the error's class and its base classes."""
    rng_states: tuple[bytes, ...]
    """States of the global generators afterwards: the CPU's, and the device's if it is a real one."""
    notes: dict[str, str]
    """What the placed pipelines did: compiled and captured models, the largest batch."""
    requests: int
    """Number of served calls."""
    seconds: float


def observe(usage: Usage, variant: Variant, *, placed: bool) -> Observation:
    """Run a usage in a forked process and return what it produced."""
    if placed and variant.virtual:
        return run_forked(
            variant.device, lambda _: observe_here(usage, variant, placed=placed), timeout_s=variant.timeout_s
        )
    return call_in_fork(
        lambda: observe_here(usage, variant, placed=placed), name=usage.name, timeout_s=variant.timeout_s
    )


def observe_here(usage: Usage, variant: Variant, *, placed: bool) -> Observation:
    """Run a usage in this process and return what it produced."""
    start = time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    session = Session(variant, placed=placed)
    values: Any = {}
    error = ""
    error_types: tuple[str, ...] = ()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            values = usage.run(session)
        except Exception as raised:  # noqa: BLE001 - errors are compared too
            error = f"{type(raised).__name__}: {raised}"
            error_types = tuple(kind.__name__ for kind in type(raised).__mro__)
    named = values if isinstance(values, dict) else {"result": values}
    # Dynamo warns about each function at which it starts a graph, and graphs start at other functions with a mode.
    # torch warns about dtypes of autocast that a device type does not have.
    # anyaccel warns about arguments that a pipeline ignores.
    # Inductor recommends TF32 and does not fuse complex operations.
    # Deprecated functions that torch itself calls are reported only to developers of torch.
    entries = [entry for entry in caught if entry.category is not DeprecationWarning or _TORCH not in entry.filename]
    texts = {f"{entry.category.__name__}: {entry.message}" for entry in entries}
    ignored = (
        "Dynamo detected",
        " autocast, but",
        " and has no effect",
        "TensorFloat32 tensor cores",
        "complex operators",
    )
    texts = {text for text in texts if not any(part in text for part in ignored)}
    return Observation(
        {key: _freeze(value) for key, value in named.items()},
        tuple(sorted(texts)),
        error,
        error_types,
        _read_rng_states(variant.stock_device),
        _describe_pipelines(session),
        sum(served.calls for served in session.served.values()),
        time.perf_counter() - start,
    )


def _read_rng_states(device: str) -> tuple[bytes, ...]:
    states = [torch.default_generator.get_state()]
    if device != "cpu":
        states.append(torch.get_device_module(device).get_rng_state())
    return tuple(state.numpy().tobytes() for state in states)


def _describe_pipelines(session: Session) -> dict[str, str]:
    notes = {}
    for pipe in session.pipelines:
        report = pipe.plan.report
        for name in ("compiled_models", "not_compiled", "capture"):
            decision = getattr(report, name, None)
            if decision is not None:
                notes[name] = f"{decision}: {decision.reason}"[:300]
    if session.served:
        notes["largest_batch"] = str(max(served.largest_batch for served in session.served.values()))
    return notes


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


@dataclass
class Comparison:
    """Differences between stock diffusers and a placed pipeline."""

    difference: float = 0.0
    """Largest difference of an array or a float, relative to the range of the expected one."""
    lines: list[str] = field(default_factory=list)
    """One line per difference that is not allowed."""


def compare(expected: Observation, actual: Observation, tolerance: float) -> Comparison:
    """Compare two observations; numbers may differ by `tolerance`, relative to their range."""
    comparison = Comparison()
    # A subclass of the same exception may have another message.
    if expected.error_types[:1] != actual.error_types[:1] and not (
        set(expected.error_types[:1]) & set(actual.error_types)
    ):
        comparison.lines.append(f"error: {expected.error or 'none'} != {actual.error or 'none'}")
        return comparison
    if expected.values.keys() != actual.values.keys():
        comparison.lines.append(f"values: {sorted(expected.values)} != {sorted(actual.values)}")
    for name in expected.values.keys() & actual.values.keys():
        _compare_value(comparison, name, expected.values[name], actual.values[name], tolerance)
    for name, first, second in zip(("CPU", "device"), expected.rng_states, actual.rng_states, strict=False):
        if first != second:
            comparison.lines.append(f"the state of the global {name} generator differs")
    new = set(actual.warnings) - set(expected.warnings)
    missing = set(expected.warnings) - set(actual.warnings)
    comparison.lines += [f"additional warning: {text}" for text in sorted(new)]
    comparison.lines += [f"missing warning: {text}" for text in sorted(missing)]
    return comparison


def _compare_value(comparison: Comparison, name: str, first: Any, second: Any, tolerance: float) -> None:
    if not (_is_number(first) and _is_number(second)):
        if type(first) is not type(second) or first != second:
            comparison.lines.append(f"{name}: {first!r} != {second!r}"[:300])
        return
    left, right = numpy.asarray(first), numpy.asarray(second)
    if left.shape != right.shape or left.dtype != right.dtype:
        comparison.lines.append(f"{name}: {left.dtype}{left.shape} != {right.dtype}{right.shape}")
        return
    if left.dtype == numpy.uint8 and left.ndim >= 3 and tolerance:  # an image, not the state of a generator
        # Rounded results may be in two neighboring levels of an image, however close they are.
        steps = int(numpy.abs(left.astype(int) - right.astype(int)).max(initial=0))
        comparison.difference = max(comparison.difference, tolerance if steps == 1 else steps / 255)
        if steps > 1:
            comparison.lines.append(f"{name}: differs by {steps} of 255, 1 allowed")
        return
    if not numpy.issubdtype(left.dtype, numpy.floating):
        if not numpy.array_equal(left, right):
            comparison.lines.append(f"{name}: {left.dtype} values differ")
        return
    if numpy.array_equal(left, right, equal_nan=True):
        return
    spread = float(numpy.ptp(left)) if left.size > 1 else abs(float(left))
    difference = float(numpy.abs(left.astype(float) - right.astype(float)).max(initial=0.0)) / max(spread, 1e-12)
    comparison.difference = max(comparison.difference, difference)
    if not difference <= tolerance:
        comparison.lines.append(f"{name}: differs by {difference:.1e} of its range, {tolerance:.0e} allowed")


def _is_number(value: Any) -> bool:
    return isinstance(value, float | numpy.ndarray)
