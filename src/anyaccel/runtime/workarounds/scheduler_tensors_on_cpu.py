"""Schedulers that stay on the CPU, so reading a timestep does not synchronize with the device.

During a call, the scheduler's methods run with `device="cpu"`, and `CpuTensors` tracks the tensors
that they create. If a pipeline tries to move such a tensor to the device, the tensor stays on the
CPU. The torch function mode copies it when an operation uses it together with device tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from anyaccel.backends.device_type_checks import is_host
from anyaccel.runtime.workarounds.method_override import override_method

__all__ = ["CpuTensors", "keep_on_cpu"]

# `index_for_timestep` calls `nonzero().item()`, which synchronizes:
# https://github.com/huggingface/diffusers/pull/11696 (diffusers 0.42 avoids it in some pipelines only).
# Calling `set_begin_index` ourselves would not be enough: many pipelines also compare `timestep.to(device)` with a
# Python number at every step.
_TIMESTEP_METHODS = ("step", "scale_model_input", "index_for_timestep", "previous_timestep", "get_velocity")


class CpuTensors:
    """A registry of the schedulers' CPU tensors and of tensors computed only from them."""

    def __init__(self) -> None:
        self._tensors: dict[int, torch.Tensor] = {}
        """By the address of the storage. The reference keeps the address from being reused during the call."""
        self.closed = False

    def add(self, tensor: torch.Tensor) -> None:
        """Track a tensor and all views that share its storage."""
        address = tensor.untyped_storage().data_ptr()
        if address:  # an empty tensor has no storage
            self._tensors[address] = tensor

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is tracked or is a view of a tracked one."""
        return is_host(tensor.device) and tensor.untyped_storage().data_ptr() in self._tensors

    def close(self) -> None:
        """Stop tracking all tensors at the end of the call."""
        self._tensors.clear()
        self.closed = True


@contextmanager
def keep_on_cpu(components: dict[str, Any]) -> Iterator[CpuTensors]:
    """Keep the schedulers' tensors on the CPU inside the `with` block; yield the registry of tensors."""
    cpu_tensors = CpuTensors()
    schedulers = {id(component): component for component in components.values() if _is_scheduler(component)}.values()
    with ExitStack() as stack:
        stack.callback(cpu_tensors.close)
        for scheduler in schedulers:
            _track_attributes(scheduler, cpu_tensors)
            scheduler_class: Any = type(scheduler)
            for name, signature in _find_methods(scheduler_class).items():
                # Some pipelines deep-copy their scheduler during the call, for a second stream such as audio.
                method = _CpuMethod(signature, cpu_tensors)
                stack.enter_context(override_method(scheduler, name, method, in_deep_copies=True))
        yield cpu_tensors


def _is_scheduler(component: Any) -> bool:
    is_module = isinstance(component, torch.nn.Module)
    return hasattr(component, "set_timesteps") and hasattr(component, "step") and not is_module


def _track_attributes(scheduler: Any, cpu_tensors: CpuTensors) -> None:
    for value in vars(scheduler).values():
        if isinstance(value, torch.Tensor) and is_host(value.device):
            cpu_tensors.add(value)


@functools.cache
def _find_methods(scheduler_class: Any) -> dict[str, inspect.Signature]:
    """Return the signatures of a scheduler's methods that accept a device or a timestep, by method name."""
    signatures = {}
    for name, method in inspect.getmembers(scheduler_class, inspect.isfunction):
        parameters = inspect.signature(method).parameters
        if not name.startswith("__") and (
            "device" in parameters or (name in _TIMESTEP_METHODS and "timestep" in parameters)
        ):
            signatures[name] = inspect.signature(method)
    return signatures


class _CpuMethod:
    """A wrapper that runs a scheduler method with `device="cpu"` and with its timestep on the CPU."""

    def __init__(self, signature: inspect.Signature, cpu_tensors: CpuTensors) -> None:
        self.cpu_tensors = cpu_tensors
        names = list(signature.parameters)[1:]
        self.device_position = names.index("device") if "device" in names else None
        self.timestep_position = names.index("timestep") if "timestep" in names else None

    def __call__(self, scheduler: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.cpu_tensors.closed:  # a deep copy of the scheduler that outlived the call
            return run(*args, **kwargs)
        values = list(args)
        if self.device_position is not None:
            _set_argument(values, kwargs, self.device_position, "device", torch.device("cpu"))
        if self.timestep_position is not None:
            position = self.timestep_position
            timestep = values[position] if position < len(values) else kwargs.get("timestep")
            if isinstance(timestep, torch.Tensor) and not is_host(timestep.device):
                _set_argument(values, kwargs, position, "timestep", timestep.cpu())
        result = run(*values, **kwargs)
        if self.device_position is not None:
            _track_attributes(scheduler, self.cpu_tensors)
        return result


def _set_argument(args: list[Any], kwargs: dict[str, Any], position: int, name: str, value: Any) -> None:
    """Replace an argument that may be passed by position or by keyword."""
    if position < len(args):
        args[position] = value
    else:
        kwargs[name] = value
