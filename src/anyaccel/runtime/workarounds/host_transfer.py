"""Automatic copies of CPU tensors that are used together with tensors on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anyaccel.backends.device_type_checks import is_host, is_on
from anyaccel.runtime.workarounds.complex_pairs import make_complex_pair
from anyaccel.runtime.workarounds.dtypes import cast_checked
from anyaccel.runtime.workarounds.scheduler_tensors_on_cpu import CpuTensors

__all__ = ["CopyFunction", "HostTransfer", "copy_or_fill"]

CopyFunction = Callable[[torch.Tensor, torch.device], torch.Tensor]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# Larger tensors are copied without checking whether all elements are equal.
_MAX_FILL_ELEMENTS = 64
# Names of the first argument of in-place functions.
_FIRST_ARGUMENT = ("input", "self", "tensor")


class HostTransfer:
    """A helper that moves the CPU tensors in a torch function's arguments to one device.

    A function that writes into a CPU tensor runs on the CPU instead.
    """

    def __init__(
        self,
        device: torch.device,
        replacements: dict[torch.dtype, torch.dtype],
        *,
        clone_scalars: bool = False,
        complex_as_pairs: bool = False,
    ) -> None:
        self.device = device
        self.device_type = device.type
        self.replacements = replacements
        self.clone_scalars = clone_scalars
        self.complex_as_pairs = complex_as_pairs
        self.targets_cpu = is_host(device)
        self.cpu_tensors: CpuTensors | None = None
        """Tensors of the schedulers, where the plan keeps those on the CPU."""
        self.copy: CopyFunction = torch.Tensor.to
        """Copies a CPU tensor to the device."""

    def align_arguments(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments, with CPU tensors moved to the device if any tensor argument is already on it."""
        if self.targets_cpu or self._find_devices(args, kwargs) != (True, True):
            return args, kwargs
        return self._move_arguments(func, args, kwargs)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, moving its CPU tensors to the device if it also has device tensors.

        Track CPU results that are computed from scheduler tensors.
        """
        on_cpu, on_device = (False, False) if self.targets_cpu else self._find_devices(args, kwargs)
        if not on_cpu:  # the common case: nothing to move and nothing to track
            return func(*args, **kwargs)
        aligned_args, aligned_kwargs = self._move_arguments(func, args, kwargs) if on_device else (args, kwargs)
        result = func(*aligned_args, **aligned_kwargs)
        if (
            self.cpu_tensors is not None
            and isinstance(result, torch.Tensor)
            and is_host(result.device)
            and any(isinstance(value, torch.Tensor) and self.cpu_tensors.owns(value) for value in args)
        ):
            self.cpu_tensors.add(result)
        return result

    def stays_on_cpu(self, tensor: torch.Tensor, target: torch.device) -> bool:
        """Return whether to skip `tensor.to(target)` because the tensor belongs to a scheduler.

        A scheduler tensor is copied only when an operation uses it together with device tensors.
        """
        return self.cpu_tensors is not None and target.type == self.device_type and self.cpu_tensors.owns(tensor)

    def _find_devices(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, bool]:
        """Return whether the arguments contain CPU tensors and whether they contain device tensors.

        Lists and tuples are searched one level deep.
        """
        on_cpu = on_device = False
        for value in (*args, *kwargs.values()) if kwargs else args:
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, torch.Tensor):
                    if is_on(tensor.device, self.device_type):
                        on_device = True
                    elif is_host(tensor.device):
                        on_cpu = True
        return on_cpu, on_device

    def _move_arguments(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Move CPU tensors to the device, or device tensors to the CPU if the function writes into a CPU tensor.

        A function that writes into tensors on both devices gets its arguments unchanged, and torch raises an error.
        """
        written_on_cpu = {is_host(tensor.device) for tensor in _find_written(func, args, kwargs)}
        if len(written_on_cpu) == 2:
            return args, kwargs
        if func is torch.Tensor.__setitem__ and written_on_cpu == {False}:
            # torch moves indices, and values for slices.
            return (*args[:2], args[2] if _is_basic_index(args[1]) else self._move(args[2])), kwargs
        move = _to_cpu if True in written_on_cpu else self._move
        return tuple(move(value) for value in args), {name: move(value) for name, value in kwargs.items()}

    def _move(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.to_device(value) if is_host(value.device) else value
        return _map_list(value, self._move_item)

    def _move_item(self, item: Any) -> Any:
        """Move an item of a list: `torch.stack` and `torch.cat` do not accept 0-dim CPU tensors."""
        moved = self._move(item)
        is_scalar = isinstance(moved, torch.Tensor) and moved.dim() == 0 and is_host(moved.device)
        return copy_or_fill(moved, self.device, self.copy) if is_scalar else moved

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Move a CPU tensor to the device in a supported dtype; a 0-dim tensor stays on the CPU."""
        if self.complex_as_pairs and tensor.is_complex():
            return make_complex_pair(tensor, self.device)
        replacement = self.replacements.get(tensor.dtype)
        if replacement is not None:
            tensor = cast_checked(tensor, replacement)
        if tensor.dim() == 0:
            # torch accepts 0-dim CPU tensors next to device tensors, but MPS reads the wrong element of a view such
            # as sigmas[3]: https://github.com/pytorch/pytorch/issues/187117 (torch 2.12 and 2.13).
            return tensor.clone() if self.clone_scalars and tensor.storage_offset() else tensor
        return copy_or_fill(tensor, self.device, self.copy)


def _map_list(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to the items of a list or tuple that contains tensors; return other values unchanged."""
    if isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value):
        return type(value)([function(item) for item in value])
    return value


def _to_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else _map_list(value, _to_cpu)


def _find_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a torch function writes into: `out=`, and the first argument of in-place functions.

    The name of an in-place function ends with one underscore (`add_`, `_foreach_add_`) or is an augmented operator
    (`__ior__`). Batch and instance normalization write into the running statistics.
    """
    name = getattr(func, "__name__", "")
    written = [kwargs.get("out")]
    if name in ("batch_norm", "instance_norm"):
        written += [*args[1:3], kwargs.get("running_mean"), kwargs.get("running_var")]
    if (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__":
        written.append(args[0] if args else next((kwargs[name] for name in _FIRST_ARGUMENT if name in kwargs), None))
    values = [item for value in written for item in (value if isinstance(value, list | tuple) else (value,))]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _is_basic_index(index: Any) -> bool:
    entries = index if isinstance(index, tuple) else (index,)
    return all(entry is None or entry is Ellipsis or isinstance(entry, int | slice) for entry in entries)


def copy_or_fill(tensor: torch.Tensor, device: torch.device, copy: CopyFunction = torch.Tensor.to) -> torch.Tensor:
    """Copy a CPU tensor to the device; if it is small and uniform, fill a new tensor there instead.

    Filling does not synchronize with the device. A typical uniform tensor is a batch of timesteps.
    """
    if tensor.requires_grad and torch.is_grad_enabled():  # autograd records `to`, but no fill and no other copy
        return tensor.to(device)
    # A copy from pageable memory waits for the work in the stream, a fill does not:
    # https://docs.nvidia.com/cuda/cuda-runtime-api/api-sync-behavior.html
    if 0 < tensor.numel() <= _MAX_FILL_ELEMENTS and not tensor.is_complex():
        first = tensor.flatten()[0]
        if tensor.numel() == 1 or not any(tensor.stride()) or bool((tensor == first).all()):
            return torch.full(tensor.shape, first.item(), dtype=tensor.dtype, device=device)
    return copy(tensor, device)
