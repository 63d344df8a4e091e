"""The scheduler on the host: its timesteps and sigmas are looked up there, and the device is never asked.

While a call runs, the scheduler's methods are told to keep their numbers on the host, and `CpuTensors` knows those
numbers: a pipeline that takes one to the device gets it on the host, and torch's function seam takes it along where it
meets the device.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from anyaccel.backends.torch_device import is_host
from anyaccel.runtime.workarounds.method_override import override_method

__all__ = ["CpuTensors", "keep_on_cpu"]

_BY_TIMESTEP = ("step", "scale_model_input", "index_for_timestep", "previous_timestep", "get_velocity")


class CpuTensors:
    """The numbers of the schedulers, and what was worked out from them alone."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}
        self.closed = False

    def add(self, tensor: torch.Tensor) -> None:
        """These are such numbers; they are kept, so that no other tensor takes their place in memory."""
        place = tensor.untyped_storage().data_ptr()
        if place:  # an empty tensor lies nowhere
            self._kept[place] = tensor

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is made of such numbers, or is a view of them."""
        return is_host(tensor.device) and tensor.untyped_storage().data_ptr() in self._kept

    def close(self) -> None:
        """Drop the numbers: the call has ended."""
        self._kept.clear()
        self.closed = True


@contextmanager
def keep_on_cpu(components: dict[str, Any]) -> Iterator[CpuTensors]:
    """Keep every scheduler among the components on the host while the block runs."""
    numbers = CpuTensors()
    schedulers = {id(part): part for part in components.values() if _is_scheduler(part)}.values()
    with ExitStack() as stack:
        stack.callback(numbers.close)
        for scheduler in schedulers:
            _add_numbers(scheduler, numbers)
            kind: Any = type(scheduler)
            for name, signature in _find_methods(kind).items():
                # Some pipelines copy their scheduler for a second stream: its numbers stay on the host as well.
                method = _CpuMethod(signature, numbers)
                stack.enter_context(override_method(scheduler, name, method, in_deep_copies=True))
        yield numbers


def _is_scheduler(part: Any) -> bool:
    return hasattr(part, "set_timesteps") and hasattr(part, "step") and not isinstance(part, torch.nn.Module)


def _add_numbers(scheduler: Any, numbers: CpuTensors) -> None:
    for value in vars(scheduler).values():
        if isinstance(value, torch.Tensor) and is_host(value.device):
            numbers.add(value)


@functools.cache
def _find_methods(kind: Any) -> dict[str, inspect.Signature]:
    """The methods of a scheduler's class that name a device or a timestep, with their signatures."""
    found = {}
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        parameters = inspect.signature(method).parameters
        if not name.startswith("__") and (
            "device" in parameters or (name in _BY_TIMESTEP and "timestep" in parameters)
        ):
            found[name] = inspect.signature(method)
    return found


class _CpuMethod:
    """Wraps a method: its device is the host, and its timestep is read back if a pipeline took it to the device."""

    def __init__(self, signature: inspect.Signature, numbers: CpuTensors) -> None:
        self.numbers = numbers
        names = list(signature.parameters)[1:]
        self.device = names.index("device") if "device" in names else None
        self.timestep = names.index("timestep") if "timestep" in names else None

    def __call__(self, scheduler: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.numbers.closed:  # a copy that outlived the call
            return run(*args, **kwargs)
        values = list(args)
        if self.device is not None:
            _put(values, kwargs, self.device, "device", torch.device("cpu"))
        if self.timestep is not None:
            given = values[self.timestep] if self.timestep < len(values) else kwargs.get("timestep")
            if isinstance(given, torch.Tensor) and not is_host(given.device):
                _put(values, kwargs, self.timestep, "timestep", given.cpu())
        result = run(*values, **kwargs)
        if self.device is not None:
            _add_numbers(scheduler, self.numbers)
        return result


def _put(values: list[Any], named: dict[str, Any], position: int, name: str, value: Any) -> None:
    """Give an argument another value, where it stands or by its name."""
    if position < len(values):
        values[position] = value
    else:
        named[name] = value
