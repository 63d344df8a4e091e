"""Torch's own function seam: what a plan puts right where a pipeline, or a model in it, calls torch.

Two `TorchFunctionMode`s, entered while a call runs. One looks after the glue of every pipeline: noise, and tensors of
the host that meet the device. The other is for inside the models, and only where the plan names a repair that they
need: elsewhere a model runs as it always did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

from anyaccel.backends.torch_device import is_host
from anyaccel.planning.plan import Plan
from anyaccel.runtime.workarounds import (
    complex_pairs,
    dtypes,
    dynamic_shapes,
    noise,
    sliced_attention,
    uninitialized_memory,
)
from anyaccel.runtime.workarounds.host_transfer import HostTransfer
from anyaccel.runtime.workarounds.overlapped_copy import OverlappedCopy
from anyaccel.runtime.workarounds.scheduler_on_cpu import CpuTensors
from anyaccel.upstream.torch_internals import pop_function_mode, push_function_mode, read_function_modes

__all__ = [
    "ModelFunctionMode",
    "PipelineFunctionMode",
    "enter_model",
    "keeping_function_modes",
    "leave_model",
    "make_host_transfer",
    "make_model_function_mode",
    "make_pipeline_function_mode",
]

Handler: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_FREE = {
    torch.Tensor.copy_,
    torch.Tensor.set_,
    torch.Tensor.cpu,
    torch.Tensor.numpy,
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.__setitem__,
    torch.Tensor.detach,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.is_tensor,
    torch.is_floating_point,
}
"""Functions that may take tensors of the host beside those of the device, or take one alone."""
_ATTRIBUTES = ("__get__", "__set__")
"""Reading `tensor.shape`, writing `tensor.data`: what is written must be the tensor itself, wherever it lies."""
_LONGEST_SCHEDULE = 4096
_MOVES = (torch.Tensor.to, torch.Tensor.type_as)
_PLACED_BY_ITSELF = {*_MOVES, torch.Tensor.cpu, torch.Tensor.__getitem__}
"""Functions whose own repair brings the arguments together."""


class PipelineFunctionMode(TorchFunctionMode):
    """Around the models: repairs, and tensors of the host that meet the device."""

    def __init__(self, handlers: dict[Any, Handler], meeting: HostTransfer) -> None:
        super().__init__()
        self.handlers = handlers
        self.meeting = meeting

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One call of torch's."""
        kwargs = kwargs or {}
        handler = self.handlers.get(func)
        if handler is not None:
            if func not in _PLACED_BY_ITSELF:
                args, kwargs = self.meeting.gather(args, kwargs)
            return handler(func, args, kwargs)
        if func in _FREE or getattr(func, "__name__", "") in _ATTRIBUTES:
            return func(*args, **kwargs)
        return self.meeting.run(func, args, kwargs)


class ModelFunctionMode(TorchFunctionMode):
    """Inside a model, where everything lies on the device: the repairs alone."""

    def __init__(self, handlers: dict[Any, Handler]) -> None:
        super().__init__()
        self.handlers = handlers

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One call of torch's."""
        handler = self.handlers.get(func)
        if handler is None:
            return func(*args, **(kwargs or {}))
        return handler(func, args, kwargs or {})


def make_host_transfer(plan: Plan, device: torch.device) -> HostTransfer:
    """How tensors of the host go to the device by this plan."""
    replacements = {
        getattr(torch, name): getattr(torch, instead) for name, instead in plan.replacements.value if instead != "pairs"
    }
    repairs = plan.workarounds.value
    return HostTransfer(
        device, replacements, clone_numbers="clone_scalars" in repairs, pair_complex="complex_pairs" in repairs
    )


def _make_handlers(
    plan: Plan, device: torch.device, replacements: dict[torch.dtype, torch.dtype]
) -> dict[Any, Handler]:
    """The repairs that the plan names, by the function of torch's that they are for."""
    repairs = set(plan.workarounds.value)
    handlers: dict[Any, Handler] = {}
    if "dynamic_shapes" in repairs:
        handlers |= dynamic_shapes.make_handlers(device)
    if "zero_empty" in repairs:
        handlers |= uninitialized_memory.make_zero_handlers(device)
    if "ignore_beta_zero" in repairs:
        handlers |= uninitialized_memory.make_addend_handlers()
    if "dtypes" in repairs:
        handlers = dtypes.make_handlers(device, replacements, handlers)
    if "complex_pairs" in repairs:
        handlers = complex_pairs.make_handlers(device, handlers)
    if "attention" in repairs:
        handlers |= sliced_attention.make_handlers(plan.attention.value)
    return handlers


def make_pipeline_function_mode(
    plan: Plan, device: torch.device, numbers: CpuTensors | None = None, ferry: OverlappedCopy | None = None
) -> PipelineFunctionMode:
    """The seam around the models, for one call; with a ferry where it is not the only one on the device."""
    meeting = make_host_transfer(plan, device)
    meeting.numbers = numbers
    if ferry is not None:
        meeting.carry = ferry.send
    handlers = _make_handlers(plan, device, meeting.replacements)
    handlers |= noise.make_handlers(device, meeting.replacements, meeting.carry)
    if ferry is not None:
        handlers |= ferry.make_handlers(handlers)
    if numbers is not None:
        handlers |= {func: _let_numbers_stay(meeting, handlers.get(func)) for func in _MOVES}
        handlers |= {func: _know_schedules(numbers, handlers.get(func)) for func in (torch.linspace, torch.logspace)}
    return PipelineFunctionMode(handlers, meeting)


def make_model_function_mode(plan: Plan, device: torch.device) -> ModelFunctionMode | None:
    """The seam inside the models, for as long as the plan holds; None where no repair is needed there."""
    if not plan.workarounds.value:
        return None
    replacements = make_host_transfer(plan, device).replacements
    handlers = _make_handlers(plan, device, replacements)
    if "noise" in plan.workarounds.value:
        handlers |= noise.make_handlers(device, replacements)
    return ModelFunctionMode(handlers)


def _let_numbers_stay(meeting: HostTransfer, behind: Handler | None) -> Handler:
    """`tensor.to(device)` leaves the schedulers' numbers on the host; everything else goes on as it would have."""

    def move(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target, dtype = dtypes.read_target(args[0], args[1:], kwargs)
        if meeting.stays(args[0], target):
            return meeting.run(torch.Tensor.to, (args[0], dtype), {})
        if behind is not None:
            return behind(func, args, kwargs)
        return meeting.run(func, args, kwargs) if is_host(target) else func(*args, **kwargs)

    return move


def _know_schedules(numbers: CpuTensors, behind: Handler | None) -> Handler:
    """A line of numbers that a pipeline draws on the host is a schedule, as those of its scheduler are."""

    def draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = func(*args, **kwargs) if behind is None else behind(func, args, kwargs)
        if is_host(made.device) and made.numel() <= _LONGEST_SCHEDULE:
            numbers.add(made)
        return made

    return draw


def enter_model(seam: ModelFunctionMode | None) -> tuple[list[PipelineFunctionMode], ModelFunctionMode | None]:
    """Step out of the seams around the models and into the one inside; gives what `leave_model` needs."""
    stack = read_function_modes()
    around: list[PipelineFunctionMode] = []
    while stack and isinstance(stack[-1], PipelineFunctionMode):
        around.append(pop_function_mode())
        stack.pop()
    inside = seam if around or not stack else None
    if inside is not None:
        push_function_mode(inside)
    return around, inside


@contextmanager
def keeping_function_modes() -> Iterator[None]:
    """Put the modes back that were there before: Ctrl-C may come in the middle of entering or leaving a model."""
    before = read_function_modes()
    try:
        yield
    finally:
        now = read_function_modes()
        if [id(mode) for mode in now] != [id(mode) for mode in before]:
            for _ in now:
                pop_function_mode()
            for mode in before:
                push_function_mode(mode)


def leave_model(around: list[PipelineFunctionMode], inside: ModelFunctionMode | None) -> None:
    """Step back behind the model."""
    if inside is not None:
        pop_function_mode()
    for seam in reversed(around):
        push_function_mode(seam)
