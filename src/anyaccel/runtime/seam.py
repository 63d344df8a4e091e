"""Torch's own function seam: what a plan puts right where a pipeline, or a model in it, calls torch.

A `TorchFunctionMode` that is entered while a call runs. It looks after the glue of every pipeline: noise, and tensors of
the host that meet the device. It stays out of the models unless the plan names a repair that is needed inside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from anyaccel.planning.plan import Plan
from anyaccel.runtime import attention, dtypes, noise, pairs, shapes, unwritten
from anyaccel.runtime.meeting import Meeting
from anyaccel.runtime.scheduler import HostNumbers

__all__ = ["FunctionSeam", "Handler", "leave_seam", "make_meeting", "make_seam", "return_to_seam"]

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
_MOVES = (torch.Tensor.to, torch.Tensor.type_as)
_PLACED_BY_ITSELF = {*_MOVES, torch.Tensor.__getitem__}
"""Functions whose own repair brings the arguments together."""


class FunctionSeam(TorchFunctionMode):
    """Hands each call to the repair that is for it; the others go on as they are, with their tensors in one place."""

    def __init__(self, handlers: dict[Any, Handler], meeting: Meeting, inside: bool) -> None:
        super().__init__()
        self.handlers = handlers
        self.meeting = meeting
        self.inside = inside
        """Whether it stays while a model runs."""

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
        if func in _FREE or getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        return self.meeting.run(func, args, kwargs)


def make_meeting(plan: Plan, device: torch.device) -> Meeting:
    """How tensors of the host go to the device by this plan."""
    replacements = {
        getattr(torch, name): getattr(torch, instead) for name, instead in plan.replacements.value if instead != "pairs"
    }
    repairs = plan.repairs.value
    return Meeting(device, replacements, clone_numbers="numbers" in repairs, pair_complex="pairs" in repairs)


def make_seam(
    plan: Plan, device: torch.device, source: noise.NoiseSource, numbers: HostNumbers | None = None
) -> FunctionSeam:
    """The seam for one call on one device."""
    meeting = make_meeting(plan, device)
    meeting.numbers = numbers
    replacements = meeting.replacements
    repairs = set(plan.repairs.value)
    handlers: dict[Any, Handler] = {}
    if "shapes" in repairs:
        handlers |= shapes.make_handlers(device)
    if "zeros" in repairs:
        handlers |= unwritten.make_zero_handlers(device)
    if "addends" in repairs:
        handlers |= unwritten.make_addend_handlers()
    if "dtypes" in repairs:
        handlers = dtypes.make_handlers(device, replacements, handlers)
    if "pairs" in repairs:
        handlers = pairs.make_handlers(device, handlers)
    if "attention" in repairs:
        handlers |= attention.make_handlers(plan.attention.value)
    handlers |= noise.make_handlers(device, source, replacements)
    if numbers is not None:
        handlers |= {func: _let_numbers_stay(meeting, handlers.get(func)) for func in _MOVES}
    return FunctionSeam(handlers, meeting, inside=bool(repairs))


def _let_numbers_stay(meeting: Meeting, behind: Handler | None) -> Handler:
    """`tensor.to(device)` leaves the schedulers' numbers on the host; everything else goes on as it would have."""

    def move(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target, dtype = dtypes.read_target(args[0], args[1:], kwargs)
        if meeting.stays(args[0], target):
            return meeting.run(torch.Tensor.to, (args[0], dtype), {})
        if behind is not None:
            return behind(func, args, kwargs)
        return meeting.run(func, args, kwargs) if target.type == "cpu" else func(*args, **kwargs)

    return move


def leave_seam() -> FunctionSeam | None:
    """Step out of the seam before a model runs, where no repair is needed inside; gives what `return_to_seam` needs."""
    stack = _get_current_function_mode_stack()
    if stack and isinstance(stack[-1], FunctionSeam) and not stack[-1].inside:
        seam = _pop_mode()
        return seam if isinstance(seam, FunctionSeam) else None
    return None


def return_to_seam(seam: FunctionSeam | None) -> None:
    """Step in again behind the model."""
    if seam is not None:
        _push_mode(seam)


@contextmanager
def outside_seam() -> Iterator[None]:
    """Run a block of our own as if no seam were there."""
    seam = leave_seam()
    try:
        yield
    finally:
        return_to_seam(seam)
