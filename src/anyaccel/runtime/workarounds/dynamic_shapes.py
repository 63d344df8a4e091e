"""Workarounds for data-dependent shapes, such as boolean indexing, on devices with static graphs.

The values that determine a shape are copied to the CPU. The copy takes time, but without it the
operation would fail.
"""

from __future__ import annotations

from typing import Any

import torch

from anyaccel.backends.device_type_checks import is_on
from anyaccel.runtime.workarounds.dtypes import replace_dtype

__all__ = ["make_handlers"]

# Neuron rejects data-dependent shapes (NCC_EMOD025):
# https://awsdocs-neuron.readthedocs-hosted.com/en/latest/compiler/error-codes/EMOD025.html
# Gaudi accepts them and recompiles for each resulting shape:
# https://docs.habana.ai/en/latest/PyTorch/Model_Optimization_PyTorch/Dynamic_Shapes.html

Tensor = torch.Tensor


def make_handlers(device: torch.device, replacements: dict[torch.dtype, torch.dtype]) -> dict[Any, Any]:
    """Return handlers for boolean indexing and for functions such as `nonzero` and `unique`.

    A CPU tensor that is indexed by a tensor on the device is moved there in a supported dtype.
    """
    device_type = device.type
    cpu_fallback = _CpuFallback(device)
    handlers: dict[Any, Any] = dict.fromkeys(
        (torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere, torch.unique, Tensor.unique, torch.bincount,
         Tensor.bincount, torch.unique_consecutive, Tensor.unique_consecutive),
        cpu_fallback.run,
    )  # fmt: skip

    def histc(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if tensor.device.type != device_type or tensor.is_floating_point():
            return cpu_fallback.run(func, args, kwargs)
        # transformers passes integers on all devices but CPU and MPS: torch.histc does not support them on the CPU.
        return func(tensor.cpu().double(), *args[1:], **kwargs).to(tensor.dtype).to(tensor.device)

    def getitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, index = args
        if tensor.device.type != device_type:
            return _index_cpu_tensor(func, tensor, index, device_type, replacements)
        return func(tensor, _replace_masks(index))

    def masked_select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, mask = args[0], args[1] if len(args) > 1 else kwargs["mask"]
        if tensor.device.type != device_type:
            return func(*args, **kwargs)
        shape = torch.broadcast_shapes(tensor.shape, mask.shape)
        return tensor.expand(shape)[_replace_masks(mask.expand(shape))]

    def where(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Only `where(condition)` has a data-dependent shape; it is the same as `nonzero(as_tuple=True)`.
        return cpu_fallback.run(func, args, kwargs) if len(args) + len(kwargs) == 1 else func(*args, **kwargs)

    def repeat_interleave(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _repeat_interleave(func, args, kwargs, device_type)

    return handlers | {
        Tensor.__getitem__: getitem,
        torch.histc: histc,
        Tensor.histc: histc,
        torch.masked_select: masked_select,
        Tensor.masked_select: masked_select,
        torch.where: where,
        torch.repeat_interleave: repeat_interleave,
        Tensor.repeat_interleave: repeat_interleave,
    }


class _CpuFallback:
    """A handler that runs a function on the CPU and copies its result back to the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args[0].device.type != self.device.type:
            return func(*args, **kwargs)
        result = func(*(_to_cpu(value) for value in args), **{name: _to_cpu(value) for name, value in kwargs.items()})
        if isinstance(result, tuple):
            return type(result)([tensor.to(args[0].device) for tensor in result])
        return result.to(args[0].device)


def _to_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _replace_masks(index: Any) -> Any:
    """Replace the boolean masks in an index with integer indices, which are computed on the CPU."""
    entries = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8) for entry in entries):
        return index
    replaced: list[Any] = []
    for entry in entries:
        if isinstance(entry, Tensor) and entry.dtype is torch.bool and not entry.dim():
            replaced.append(bool(entry))
        elif isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8):
            # A mask over n dimensions becomes n indices.
            replaced += [indices.to(entry.device) for indices in entry.cpu().nonzero(as_tuple=True)]
        else:
            replaced.append(entry)
    return tuple(replaced)


def _index_cpu_tensor(
    func: Any, tensor: Tensor, index: Any, device_type: str, replacements: dict[torch.dtype, torch.dtype]
) -> Any:
    """Index a CPU tensor; if the index is on the device, move the tensor there first."""
    entries = index if isinstance(index, tuple) else (index,)
    device = next(
        (entry.device for entry in entries if isinstance(entry, Tensor) and is_on(entry.device, device_type)), None
    )
    return func(tensor, index) if device is None else func(replace_dtype(tensor, replacements).to(device), index)


def _repeat_interleave(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str) -> Any:
    """Run `repeat_interleave` with a tensor of counts, which is copied to the CPU.

    The data itself stays on the device.
    """
    counts = args[1] if len(args) > 1 else kwargs["repeats"] if "repeats" in kwargs else args[0]
    if not isinstance(counts, Tensor) or counts.device.type != device_type:
        return func(*args, **kwargs)
    if len(args) + ("repeats" in kwargs) == 1:  # `repeat_interleave(counts)` returns indices
        options = {name: value for name, value in kwargs.items() if name != "repeats"}
        return func(counts.cpu(), **options).to(counts.device)
    data, dim = args[0], args[2] if len(args) > 2 else kwargs.get("dim")
    if dim is None:
        data, dim = data.flatten(), 0
    indices = torch.arange(data.shape[dim]).repeat_interleave(counts.cpu())
    return data.index_select(dim, indices.to(data.device))
