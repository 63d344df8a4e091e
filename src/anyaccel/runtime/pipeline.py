"""The portable pipeline: a diffusers pipeline, and more."""

from __future__ import annotations

import functools
from typing import Any

import diffusers
import torch

from anyaccel.planning.plan import Plan
from anyaccel.runtime.call import run_call
from anyaccel.runtime.place import place_pipeline, plan_pipeline, resolve_device, settle
from anyaccel.runtime.placement import Placement, find_placement, forget_placement
from anyaccel.planning.wishes import Wishes

__all__ = ["Portable", "make_portable", "place"]


class Portable:
    """What a diffusers pipeline gains: a plan, and a `to` that follows it."""

    _plain_class: type

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Place the pipeline: `pipe.to("neuron")`, `pipe.to("auto", dtype="bf16")`, `pipe.to(torch.float16)`.

        Takes what diffusers takes, `auto`, `virtual:NAME`, an index, and every wish of `anyaccel.place`.
        """
        device, asked = _read_target(args, kwargs)

        def move(place: torch.device, dtype: torch.dtype) -> None:
            # The vendor's switches are set by now, so that diffusers need not set them.
            super(Portable, self).to(place, dtype, silence_dtype_warnings=True, hpu_migration=False)  # type: ignore[misc]

        place_pipeline(self, device, asked, move)
        return self

    @property
    def plan(self) -> Plan:
        """What was decided for this pipeline on its device, and why; `print(pipe.plan)`."""
        return _placement_of(self).plan

    def progress_bar(self, *args: Any, **kwargs: Any) -> Any:
        """The pipeline's own progress bar, or its share of one where several calls make one batch."""
        make_bar: Any = super().progress_bar  # type: ignore[misc]
        placement = find_placement(self)
        if placement is None or placement.progress is None:
            return make_bar(*args, **kwargs)
        return placement.progress.begin(make_bar, *args, **kwargs)

    def enable_attention_slicing(self, slice_size: str | int | None = "auto") -> None:
        """Attend to some heads at a time, in every attention of every model: `auto` half of them, `max` one."""
        place_pipeline(self, None, {"attention_slicing": slice_size}, _stay)

    def disable_attention_slicing(self) -> None:
        """Attend to all heads at once again, where the device's limits allow it."""
        self.enable_attention_slicing(None)

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is made here and cannot be found by its name: the plain one is pickled, and made portable again.
        return _unpickle, (self._plain_class, forget_placement(vars(self)))


def _stay(place: torch.device, dtype: torch.dtype) -> None:
    """Move nothing: only the plan changes."""


def _unpickle(kind: type, state: dict[str, Any]) -> Any:
    pipe = kind.__new__(kind)
    vars(pipe).update(state)
    return make_portable(pipe)


def _placement_of(pipe: Any) -> Placement:
    """Where a pipeline is; one that was never placed is planned for where it lies, as it is."""
    found = find_placement(pipe)
    if found is not None:
        return found
    lies_on, dtype = getattr(pipe, "device", torch.device("cpu")), getattr(pipe, "dtype", torch.float32)
    wishes = Wishes(dtype=str(dtype).removeprefix("torch."))
    opened = resolve_device(lies_on, wishes)
    plan = plan_pipeline(pipe, opened, wishes)
    settle(pipe, Placement(opened, lies_on, plan, wishes))
    made = find_placement(pipe)
    assert made is not None
    return made


def _read_target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Device and wishes from any spelling of `to`."""
    asked = {name: value for name, value in kwargs.items() if name not in ("device", "silence_dtype_warnings")}
    device = kwargs.get("device")
    for value in args:
        if isinstance(value, torch.dtype):
            asked["dtype"] = value
        elif value is not None:
            device = value
    return device, {name: value for name, value in asked.items() if value is not None}


def make_portable(pipe: Any) -> Any:
    """The same object with a class that is portable."""
    if not isinstance(pipe, Portable):
        pipe.__class__ = portable_class(type(pipe))
    return pipe


@functools.cache
def portable_class(kind: type) -> type:
    """A class like the pipeline's own, under its name: `isinstance`, the call's signature and the config stay."""
    from anyaccel.runtime.loading import DiffusionPipeline

    first: type = DiffusionPipeline if issubclass(kind, diffusers.DiffusionPipeline) else Portable
    content: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "_plain_class": kind,
    }
    call = getattr(kind, "__call__", None)
    if call is not None:
        content["__call__"] = _wrap_call(call)
    return type(kind.__name__, (first, kind), content)


def _wrap_call(call: Any) -> Any:
    @functools.wraps(call)
    def portable_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run_call(self, _placement_of(self), call, args, kwargs)

    return portable_call


def place(pipe: Any, device: str | int | torch.device = "auto", **wishes: Any) -> Any:
    """Make a pipeline that exists portable, and place it: `anyaccel.place(pipe, "hpu", dtype="bf16")`; returns it."""
    return make_portable(pipe).to(device, **wishes)
