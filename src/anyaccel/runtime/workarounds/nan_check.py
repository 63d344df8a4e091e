"""The watch: a picture that is not finite is found, traced to its module and step, and tried again in float32."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from anyaccel.tracing.meta_module import WATCHED_BYTES, first_floating

__all__ = [
    "Mark",
    "Outputs",
    "find_first_non_finite",
    "find_non_finite",
    "note_output",
    "warn_safety_checker",
    "watching",
]

Mark = Callable[[], Callable[[], None]]
_NOW = threading.local()
_LOG = logging.getLogger("anyaccel")


class Outputs:
    """What each model gave last: references, which nobody reads before the end; of something large, its sum."""

    def __init__(self, mark: Mark | None = None) -> None:
        self.last: dict[str, torch.Tensor] = {}
        self.passes: dict[str, int] = {}
        self.mark = mark
        self.done: Callable[[], None] = lambda: None
        """Waits until the device has made them, where a mark was given."""


@contextmanager
def watching(mark: Mark | None = None) -> Iterator[Outputs]:
    """Note what the models give while the block runs; `mark` notes how far the device was asked."""
    before = getattr(_NOW, "outputs", None)
    _NOW.outputs = outputs = Outputs(mark)
    try:
        yield outputs
    finally:
        _NOW.outputs = before


def note_output(name: str, output: Any) -> None:
    """A model gave something."""
    outputs = getattr(_NOW, "outputs", None)
    tensor = first_floating(output)
    if outputs is not None and tensor is not None:
        large = tensor.numel() * tensor.element_size() > WATCHED_BYTES
        outputs.last[name] = tensor.sum(dtype=torch.float32) if large else tensor
        outputs.passes[name] = outputs.passes.get(name, 0) + 1
        if outputs.mark is not None:
            outputs.done = outputs.mark()


def find_non_finite(outputs: Outputs) -> list[str]:
    """The models whose last output is not finite, in the order in which they ran; reads from the device once."""
    if not outputs.last:
        return []
    flags = [torch.isfinite(tensor).all() for tensor in outputs.last.values()]
    verdicts = torch.stack(flags).tolist() if len({flag.device for flag in flags}) == 1 else [bool(f) for f in flags]
    return [name for name, finite in zip(outputs.last, verdicts, strict=True) if not finite]


@contextmanager
def find_first_non_finite(components: dict[str, Any]) -> Iterator[list[tuple[str, int]]]:
    """Look at every module's output while the block runs; gives the first that is not finite, and at which pass.

    It reads from the device at every module, and is for the replay of a run that failed.
    """
    found: list[tuple[str, int]] = []
    passes: dict[str, int] = {}
    handles = []

    def look(path: str, whole: str) -> Any:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            tensor = first_floating(output)
            if not found and tensor is not None and not bool(torch.isfinite(tensor).all()):
                found.append((path, passes.get(whole, 1)))

        return hook

    def count(whole: str) -> Any:
        def hook(module: torch.nn.Module, args: Any) -> None:
            passes[whole] = passes.get(whole, 0) + 1

        return hook

    for name, component in components.items():
        if isinstance(component, torch.nn.Module):
            handles.append(component.register_forward_pre_hook(count(name)))
            for path, module in component.named_modules():
                handles.append(module.register_forward_hook(look(f"{name}.{path}".rstrip("."), name)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def warn_safety_checker(result: Any) -> None:
    """Say that a picture is black since a safety checker made it so, and not since something broke."""
    flags = getattr(result, "nsfw_content_detected", None)
    if isinstance(flags, list) and any(flags):
        vars(result)["blackened"] = [bool(flag) for flag in flags]
        _LOG.warning(
            "the safety checker blackened %d of %d pictures: nothing is wrong with the device", sum(flags), len(flags)
        )
