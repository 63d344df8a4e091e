"""The module boundary: what goes into a model lies on the device, in a type that the device takes.

Hooks on the models of a pipeline. They also change torch's function seam from the one around the models to the one
inside, and hand what came out to the watch.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from anyaccel.backends.host import is_host, is_on
from anyaccel.planning.plan import Plan
from anyaccel.runtime.fast_forward import find_fast_forward
from anyaccel.runtime.meeting import Meeting, send
from anyaccel.runtime.seam import ModelSeam, enter_model, leave_model, make_meeting, make_model_seam
from anyaccel.runtime.watch import note_output

__all__ = ["Boundary", "find_boundaries", "remove_boundaries", "set_boundaries", "stepping_back"]

_MARK = "_anyaccel_boundary"
_TIMESTEPS = ("timestep", "timesteps")
_INSIDE = threading.local()


class Boundary:
    """The two hooks of one model."""

    def __init__(
        self, name: str, module: torch.nn.Module, plan: Plan, device: torch.device, seam: ModelSeam | None
    ) -> None:
        self.name = name
        self.seam = seam
        self.device = device
        self.plan = plan
        self.meeting: Meeting = make_meeting(plan, device)
        self.timestep_position = _find_timestep(module)
        self.float_timesteps = torch.int64 in self.meeting.replacements and not _looks_timesteps_up(module)
        self.cast_to: torch.dtype | None = None
        """The type that floating inputs are cast to where the model runs in another one than the pipeline."""
        self.handles: list[Any] = []

    def serves(self, plan: Plan, device: torch.device) -> bool:
        """Whether it is on its model, and does there what a plan says; memory and speed are no matter of its."""
        others = {
            name: getattr(plan, name)
            for name in ("memory", "forecast", "capture", "reuse", "quantized", "compiled", "buckets")
        }
        same = self.plan is plan or replace(self.plan, **others) == plan
        return same and self.device == device and bool(self.handles)

    def attach(self, module: torch.nn.Module) -> None:
        """Put the hooks on a model, in place of those of an earlier plan."""
        earlier = getattr(module, _MARK, None)
        if isinstance(earlier, Boundary):
            earlier.detach()
        self.handles = [
            module.register_forward_pre_hook(self.enter, with_kwargs=True),
            module.register_forward_hook(self.leave, always_call=True),
        ]
        vars(module)[_MARK] = self

    def detach(self) -> None:
        """Take the hooks off."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def enter(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before the model runs."""
        if torch.compiler.is_compiling():
            return None
        found = find_fast_forward(module)
        # A compiled model is repaired in its graph: tracing one inside a mode breaks too often.
        seam = None if found is not None and found.compiled else self.seam
        _entered().append((self, enter_model(seam)))  # whatever fails from here on, `leave` steps back
        return self._adapt(args, kwargs)

    def _adapt(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        position, name = self.timestep_position
        moved = [self._bring(value) for value in args]
        named = {key: self._bring(value) for key, value in kwargs.items()}
        if position is not None and position < len(moved):
            moved[position] = self._settle_timestep(moved[position])
        elif name in named:
            named[name] = self._settle_timestep(named[name])
        return tuple(moved), named

    def leave(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        """After it ran, or failed."""
        if torch.compiler.is_compiling():
            return None
        entered = _entered()
        if entered and entered[-1][0] is self:  # not where another hook failed before `enter`
            leave_model(*entered.pop()[1])
        note_output(self.name, output)
        return None if self.cast_to is None else _cast_back(output, getattr(torch, self.plan.dtype.value))

    def _bring(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if is_host(value.device) and not is_host(self.device):
                value = self.meeting.bring(value)
                value = send(value, self.device) if is_host(value.device) else value
            elif value.dtype in self.meeting.replacements and is_on(value.device, self.device.type):
                value = value.to(self.meeting.replacements[value.dtype])
            return value if self.cast_to is None or not value.is_floating_point() else value.to(self.cast_to)
        # A list or dictionary stays the same object unless something in it moves: some models write to theirs.
        if type(value) is dict:
            moved = {key: self._bring(item) for key, item in value.items()}
            return moved if any(moved[key] is not item for key, item in value.items()) else value
        if type(value) in (list, tuple):
            brought = [self._bring(item) for item in value]
            return type(value)(brought) if any(a is not b for a, b in zip(brought, value, strict=True)) else value
        return value

    def _settle_timestep(self, timestep: Any) -> Any:
        """A timestep as a floating tensor of the device, where the device has trouble with whole numbers of 64 bits.

        A Python number becomes a tensor too: to a compiler each value of it would be a graph of its own.
        """
        if not self.float_timesteps:
            return timestep
        if isinstance(timestep, int | float) and not isinstance(timestep, bool):
            return torch.tensor([timestep], dtype=torch.float32).to(self.device)
        whole = isinstance(timestep, torch.Tensor) and timestep.dtype in (torch.int32, torch.int64)
        return timestep.to(torch.float32) if whole else timestep

    def __reduce__(self) -> tuple[Any, ...]:
        # A module with hooks is copied and pickled with them; the handles belong to the module they were made on.
        return _rebuild, (self.name, self.plan, self.device, self.timestep_position, self.float_timesteps, self.cast_to)


def _rebuild(name: str, plan: Plan, device: torch.device, position: Any, floats: bool, cast_to: Any) -> Boundary:
    made = Boundary.__new__(Boundary)
    made.name, made.plan, made.device = name, plan, device
    made.seam = make_model_seam(plan, device)
    made.meeting = make_meeting(plan, device)
    made.timestep_position, made.float_timesteps, made.cast_to, made.handles = position, floats, cast_to, []
    return made


def _entered() -> list[tuple[Boundary, Any]]:
    """The models that this thread is inside of, with what leaving each needs."""
    entered: list[tuple[Boundary, Any]] = _INSIDE.__dict__.setdefault("entered", [])
    return entered


@contextmanager
def stepping_back() -> Iterator[None]:
    """After the block, be outside of all models that were entered in it: Ctrl-C ends a model without its hooks."""
    before = len(_entered())
    try:
        yield
    finally:
        while len(_entered()) > before:
            leave_model(*_entered().pop()[1])


def set_boundaries(components: dict[str, Any], plan: Plan, device: torch.device) -> None:
    """Put a boundary on every model that has none for this plan: those that were exchanged since, too."""
    seam: ModelSeam | None = None
    for name, component in components.items():
        if not isinstance(component, torch.nn.Module):
            continue
        for part in _entrances(component):
            inside = getattr(part, "_orig_mod", None)
            if isinstance(inside, torch.nn.Module):
                _remove_boundary(inside)
            earlier = vars(part).get(_MARK)
            if isinstance(earlier, Boundary) and earlier.serves(plan, device):
                continue
            seam = seam or make_model_seam(plan, device)
            boundary = Boundary(name, part, plan, device, None if hasattr(part, "_orig_mod") else seam)
            if isinstance(earlier, Boundary):
                boundary.cast_to = earlier.cast_to
            boundary.attach(part)


def _remove_boundary(module: torch.nn.Module) -> None:
    """Take the boundary off a model that was compiled since: it goes around what was compiled."""
    earlier = vars(module).pop(_MARK, None)
    if isinstance(earlier, Boundary):
        earlier.detach()


def remove_boundaries(components: dict[str, Any]) -> None:
    """Take all boundaries off, so that the models are as diffusers made them."""
    for component in components.values():
        if isinstance(component, torch.nn.Module):
            for part in _entrances(component):
                _remove_boundary(part)


def find_boundaries(component: torch.nn.Module) -> list[Boundary]:
    """The boundaries of one model."""
    marks = [vars(part).get(_MARK) for part in _entrances(component)]
    return [mark for mark in marks if isinstance(mark, Boundary)]


def _entrances(component: torch.nn.Module) -> list[torch.nn.Module]:
    """Where a pipeline enters a model: the model itself, or the parts of one that is called by other names."""
    if hasattr(component, "decode") and not hasattr(component, "generate"):
        return [component, *component.children()]
    return [component]


def _find_timestep(module: torch.nn.Module) -> tuple[int | None, str]:
    """Where a model takes its timestep: the position and the name."""
    names = list(inspect.signature(getattr(module, "_orig_mod", module).forward).parameters)
    found = next((name for name in names if name in _TIMESTEPS), "")
    return (names.index(found), found) if found else (None, "")


def _looks_timesteps_up(module: torch.nn.Module) -> bool:
    """Whether a timestep is an index into a table there, and so must stay a whole number."""
    config = getattr(module, "config", {})
    return bool(getattr(config, "num_embeds_ada_norm", None))


def _cast_back(output: Any, dtype: torch.dtype) -> Any:
    if isinstance(output, torch.Tensor):
        return output.to(dtype) if output.is_floating_point() else output
    if isinstance(output, tuple):
        return type(output)(_cast_back(item, dtype) for item in output)
    if hasattr(output, "items"):
        for key, value in output.items():
            output[key] = _cast_back(value, dtype)
    return output
