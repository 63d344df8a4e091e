"""Shapes that depend on values, on devices whose graphs are static: the values are read on the host.

It costs the round trip that the device would refuse; the work on the data itself stays on the device.
"""

from __future__ import annotations

from typing import Any

import torch

from anyaccel.backends.torch_device import is_on

__all__ = ["make_handlers"]

Tensor = torch.Tensor


def make_handlers(device: torch.device) -> dict[Any, Any]:
    """Handlers for masks as indices, and for the functions that find or count."""
    kind = device.type
    on_host = _OnHost(device)
    handlers: dict[Any, Any] = dict.fromkeys(
        (torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere, torch.unique, Tensor.unique, torch.bincount,
         Tensor.bincount, torch.unique_consecutive, Tensor.unique_consecutive, torch.histc, Tensor.histc),
        on_host.run,
    )  # fmt: skip

    def index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, where = args
        if tensor.device.type != kind:
            return _index_host(func, tensor, where, kind)
        return func(tensor, _settle_masks(where))

    def select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, mask = args[0], args[1] if len(args) > 1 else kwargs["mask"]
        if tensor.device.type != kind:
            return func(*args, **kwargs)
        whole = torch.broadcast_shapes(tensor.shape, mask.shape)
        return tensor.expand(whole)[_settle_masks(mask.expand(whole))]

    def where(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return on_host.run(func, args, kwargs) if len(args) + len(kwargs) == 1 else func(*args, **kwargs)

    def repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _repeat(func, args, kwargs, kind)

    return handlers | {
        Tensor.__getitem__: index,
        torch.masked_select: select,
        Tensor.masked_select: select,
        torch.where: where,
        torch.repeat_interleave: repeat,
        Tensor.repeat_interleave: repeat,
    }


class _OnHost:
    """Runs a small function on the host and brings its result back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args[0].device.type != self.device.type:
            return func(*args, **kwargs)
        result = func(*(_read(value) for value in args), **{name: _read(value) for name, value in kwargs.items()})
        if isinstance(result, tuple):
            return type(result)([part.to(args[0].device) for part in result])
        return result.to(args[0].device)


def _read(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _settle_masks(where: Any) -> Any:
    """An index in which every mask has become the places where it is true."""
    entries = where if isinstance(where, tuple) else (where,)
    if not any(isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8) for entry in entries):
        return where
    settled: list[Any] = []
    for entry in entries:
        if isinstance(entry, Tensor) and entry.dtype is torch.bool and not entry.dim():
            settled.append(bool(entry))
        elif isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8):
            settled += [place.to(entry.device) for place in entry.cpu().nonzero(as_tuple=True)]
        else:
            settled.append(entry)
    return tuple(settled)


def _index_host(func: Any, tensor: Tensor, where: Any, kind: str) -> Any:
    """A tensor of the host by an index of the device: the tensor goes there, so that nothing is read back."""
    entries = where if isinstance(where, tuple) else (where,)
    there = next((entry.device for entry in entries if isinstance(entry, Tensor) and is_on(entry.device, kind)), None)
    return func(tensor, where) if there is None else func(tensor.to(there), where)


def _repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: str) -> Any:
    """`repeat_interleave` by a tensor of counts: the counts are read, the data is gathered where it is."""
    counts = args[1] if len(args) > 1 else kwargs.get("repeats", args[0])
    if not isinstance(counts, Tensor) or counts.device.type != kind:
        return func(*args, **kwargs)
    if len(args) == 1 and "repeats" not in kwargs:
        return func(counts.cpu(), **kwargs).to(counts.device)
    data, dim = args[0], args[2] if len(args) > 2 else kwargs.get("dim")
    if dim is None:
        data, dim = data.flatten(), 0
    places = torch.arange(data.shape[dim]).repeat_interleave(counts.cpu())
    return data.index_select(dim, places.to(data.device))
