"""Usages of diffusers pipelines, and the ways to run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import PIL.Image
import torch

import anyaccel
from anyaccel.recipes import recipes
from anyaccel.recipes.recipe import _as_array, _move_tensors
from tests.differential.serving import ServedPipeline, make_companion

__all__ = [
    "CPU_NOISE",
    "CUDA_VARIANTS",
    "USAGES",
    "VARIANTS",
    "Session",
    "Usage",
    "Variant",
    "as_array",
    "twice",
    "usage",
]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to place the pipelines of a usage."""

    name: str
    summary: str
    """Heading of the variant in the documentation."""
    device: str = "cpu"
    virtual: bool = False
    """Whether the device is a virtual one. Stock diffusers then runs on the CPU, otherwise on the same device."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options for `anyaccel.place`."""
    tolerance: float = 0.0
    """Largest allowed difference from stock diffusers, relative to the range of its result; 0 compares bits."""
    served: bool = False
    """Whether each call is batched with a concurrent call, as in `anyaccel serve`."""
    earlier_calls: int = 0
    """Number of calls with other seeds before the first call of each pipeline."""
    timeout_s: float = 120.0

    @property
    def stock_device(self) -> str:
        """Device that stock diffusers runs on."""
        return "cpu" if self.virtual else self.device


_COMPILED_S = 400.0
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(name="cpu", summary="CPU"),
        Variant(name="split", summary="one image at a time", options={"images_per_call": 1}, tolerance=1e-4),
        # The server allows 1e-4 per model call.
        Variant(name="served", summary="served", served=True, tolerance=1e-3),
        Variant(name="mps", summary="virtual MPS", device="mps", virtual=True, tolerance=1e-4),
        Variant(name="neuron", summary="virtual Neuron", device="neuron", virtual=True, tolerance=1e-4),
        Variant(name="cuda", summary="CUDA", device="cuda", options={"compile": False}, tolerance=1e-3),
        Variant(
            # The models are compiled in the first call. A graph is captured at the third run of a shape.
            name="cuda-captured", summary="CUDA, compiled and captured", device="cuda",
            options={"compile": True}, tolerance=1e-3, earlier_calls=3, timeout_s=_COMPILED_S,
        ),
    )
}  # fmt: skip


HALF_PRECISION = 0.05
"""Tolerance for usages in which compiled models run in bfloat16, which has 8 bits."""

CUDA_VARIANTS = tuple(name for name, variant in VARIANTS.items() if variant.device == "cuda")
CPU_NOISE = dict.fromkeys(
    CUDA_VARIANTS,
    "without a generator, diffusers draws on the device, and anyaccel on the CPU with the same result on all devices",
)
"""Reason for skipping a usage that draws from the global generator."""


READY: dict[str, list[Any]] = {}
"""Pipelines that were built before this process was forked, by recipe. Building one takes longer than calling it."""


class Session:
    """Creates and calls the pipelines of a usage: stock ones, or placed ones."""

    def __init__(self, variant: Variant, *, placed: bool) -> None:
        self.variant, self.placed = variant, placed
        self.device = variant.device if placed else variant.stock_device
        self.pipelines: list[Any] = []
        """Placed pipelines, in the order of their creation."""
        self.served: dict[int, ServedPipeline] = {}
        """Served pipelines by the id of the pipeline."""
        self._called: set[int] = set()

    def place(self, pipe: Any, **options: Any) -> Any:
        """Place a pipeline on the variant's device; with stock diffusers, move it there."""
        if not self.placed:
            return pipe if self.device == "cpu" else pipe.to(self.device)
        pipe = anyaccel.place(pipe, self.device, dtype="float32", **{**self.variant.options, **options})
        self.pipelines.append(pipe)
        return pipe

    def make(self, name: str = "stable-diffusion", *, place: bool = True) -> Any:
        """Return a tiny pipeline, placed unless `place` is false."""
        # Tensors created under inference mode differ from those of a pipeline that was built earlier.
        is_ready = bool(READY.get(name)) and not torch.is_inference_mode_enabled()
        pipe: Any = READY[name].pop() if is_ready else recipes()[name].make()
        return self.place(pipe) if place else pipe

    def arguments(self, name: str = "stable-diffusion", **changes: Any) -> dict[str, Any]:
        """Return the call arguments of a recipe with changes; None removes an argument."""
        call = {**recipes()[name].call(), **changes}
        return {key: value for key, value in call.items() if value is not None}

    def run(self, pipe: Any, name: str = "stable-diffusion", **changes: Any) -> Any:
        """Call a pipeline with its recipe's arguments and return the output as an array."""
        output = self.call(pipe, **_move_tensors(self.arguments(name, **changes), pipe.device))
        values = output.to_tuple() if hasattr(output, "to_tuple") else output
        return as_array(next(value for value in values if value is not None) if isinstance(values, tuple) else values)

    def call(self, pipe: Any, **arguments: Any) -> Any:
        """Call a pipeline in the way of the variant, and return its output."""
        if not self.placed:
            return pipe(**arguments)
        if self.variant.served:
            return self.served.setdefault(id(pipe), ServedPipeline(pipe)).call(arguments)
        if self.variant.earlier_calls and id(pipe) not in self._called:
            self._called.add(id(pipe))
            with torch.random.fork_rng():
                for _ in range(self.variant.earlier_calls):
                    pipe(**make_companion(arguments))
        return pipe(**arguments)


def as_array(value: Any) -> Any:
    """Convert tensors and nested lists of them to a float32 array, and images to a uint8 array."""
    images = _flatten(value)
    if images and all(isinstance(image, PIL.Image.Image) for image in images):
        return numpy.stack([numpy.asarray(image) for image in images])
    return _as_array(value)


def _flatten(value: Any) -> list[Any]:
    """Return the entries of nested lists: some pipelines return a list of images for each video."""
    return [entry for part in value for entry in _flatten(part)] if isinstance(value, list | tuple) else [value]


def twice(session: Session, edit: Callable[[Any], Any], **changes: Any) -> dict[str, Any]:
    """Call a pipeline, edit it, and call it again."""
    pipe = session.make()
    first = session.run(pipe, **changes)
    edit(pipe)
    return {"before": first, "after": session.run(pipe, **changes)}


Run = Callable[[Session], Any]


@dataclass(frozen=True, kw_only=True)
class Usage:
    """One way to use a diffusers pipeline."""

    name: str
    group: str
    summary: str
    """Description in one line."""
    run: Run
    """Returns a value or a dict of values to compare."""
    rejected: dict[str, str] = field(default_factory=dict)
    """Part of the error message for each variant that does not support this usage."""
    skip: dict[str, str] = field(default_factory=dict)
    """Variants that do not apply, with the reason."""
    tolerance: float = 0.0
    """Largest allowed difference, if it is larger than that of the variant."""
    compiled_tolerance: float = 0.0
    """Largest allowed difference for compiled models; fused half-precision operations are rounded less often."""
    fails: bool = False
    """Whether stock diffusers raises an error; any other usage must produce a result."""


USAGES: dict[str, Usage] = {}


def usage(group: str, **fields: Any) -> Callable[[Run], Run]:
    """Register a function as a usage; its docstring describes it."""

    def add(run: Run) -> Run:
        name = run.__name__  # type: ignore[attr-defined]
        assert name not in USAGES, name
        assert run.__doc__, name
        USAGES[name] = Usage(name=name, group=group, summary=run.__doc__.splitlines()[0], run=run, **fields)
        return run

    return add
