"""Checks for NaN and Inf in model outputs, and a search for the first module that produces them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from anyaccel.tracing.meta_module import MAX_KEPT_OUTPUT_BYTES, first_floating
from anyaccel.upstream.torch_internals import read_version

__all__ = [
    "OutputCheck",
    "RecordEvent",
    "checking_outputs",
    "find_first_non_finite",
    "find_non_finite",
    "record_output",
    "warn_safety_checker",
]

# Records an event after the last enqueued work; returns a function that waits for it.
RecordEvent = Callable[[], Callable[[], None]]
_ACTIVE = threading.local()  # concurrent calls share models, so outputs are recorded per thread
_LOG = logging.getLogger("anyaccel")


class OutputCheck:
    """The last output of each model, which is checked for NaN and Inf only after the call.

    An output that the pipeline has changed in place by then is not checked.
    """

    def __init__(self, record_event: RecordEvent | None = None) -> None:
        self.last_outputs: dict[str, tuple[torch.Tensor, int | None]] = {}
        """The last output of each model and its version, or the output's sum and None."""
        self.forward_counts: dict[str, int] = {}
        self.last_model = ""
        """The model that ran last."""
        self.record_event = record_event
        self.wait: Callable[[], None] = lambda: None
        """Waits for the last recorded output, if events are recorded."""


@contextmanager
def checking_outputs(record_event: RecordEvent | None = None) -> Iterator[OutputCheck]:
    """Record the outputs of all models that this thread runs inside the `with` block."""
    before = getattr(_ACTIVE, "check", None)
    _ACTIVE.check = check = OutputCheck(record_event)
    try:
        yield check
    finally:
        _ACTIVE.check = before


def record_output(name: str, output: Any) -> None:
    """Record a model's output for the NaN check that is active in this thread, if any."""
    check = getattr(_ACTIVE, "check", None)
    tensor = _find_checked(output)
    if check is not None and tensor is not None:
        # The sum is NaN or Inf if an element is. It does not hold the memory of a large output, and tensors created in
        # inference mode have no version.
        sums = tensor.is_inference() or tensor.numel() * tensor.element_size() > MAX_KEPT_OUTPUT_BYTES
        check.last_outputs[name] = (tensor.sum(dtype=torch.float32), None) if sums else (tensor, read_version(tensor))
        check.last_model = name
        check.forward_counts[name] = check.forward_counts.get(name, 0) + 1
        if check.record_event is not None:
            check.wait = check.record_event()


def _find_checked(output: Any) -> torch.Tensor | None:
    """Return the first floating-point tensor in a model's output, if `torch.isfinite` supports it."""
    tensor = first_floating(output)
    if tensor is None or tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided:
        return None
    return tensor if tensor.itemsize > 1 else None  # not float8


def find_non_finite(check: OutputCheck) -> list[str]:
    """Return the names of models with NaN or Inf in their last output, in the order they first ran."""
    outputs = {
        name: tensor
        for name, (tensor, version) in check.last_outputs.items()
        if version is None or read_version(tensor) == version
    }
    if not outputs:
        return []
    flags = [torch.isfinite(tensor).all() for tensor in outputs.values()]
    # One stacked read: each separate read would be another synchronization.
    is_finite = torch.stack(flags).tolist() if len({flag.device for flag in flags}) == 1 else [bool(f) for f in flags]
    return [name for name, finite in zip(outputs, is_finite, strict=True) if not finite]


@contextmanager
def find_first_non_finite(components: dict[str, Any]) -> Iterator[list[tuple[str, int]]]:
    """Yield a list that receives the first module with NaN or Inf in its output.

    The entry is the module's path and the number of the model's forward pass. The output of every
    module inside the `with` block is checked, which synchronizes with the device. Use this only to
    rerun a failed call.
    """
    failures: list[tuple[str, int]] = []
    forward_counts: dict[str, int] = {}
    handles = []

    def make_check_hook(path: str, model: str) -> Any:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            tensor = _find_checked(output)
            if not failures and tensor is not None and not bool(torch.isfinite(tensor).all()):
                failures.append((path, forward_counts.get(model, 1)))

        return hook

    def make_count_hook(model: str) -> Any:
        def hook(module: torch.nn.Module, args: Any) -> None:
            forward_counts[model] = forward_counts.get(model, 0) + 1

        return hook

    # A module's hook runs after those of its children, so the innermost failing module is recorded first.
    for name, component in components.items():
        if isinstance(component, torch.nn.Module):
            handles.append(component.register_forward_pre_hook(make_count_hook(name)))
            for path, module in component.named_modules():
                handles.append(module.register_forward_hook(make_check_hook(f"{name}.{path}".rstrip("."), name)))
    try:
        yield failures
    finally:
        for handle in handles:
            handle.remove()


def warn_safety_checker(result: Any) -> None:
    """Warn if the safety checker replaced images with black ones, which could be mistaken for NaN."""
    flags = getattr(result, "nsfw_content_detected", None)
    if isinstance(flags, list) and any(flags):
        vars(result)["blackened"] = [bool(flag) for flag in flags]
        _LOG.warning(
            "the safety checker replaced %d of %d images with black images; this is not a device error",
            sum(flags),
            len(flags),
        )
