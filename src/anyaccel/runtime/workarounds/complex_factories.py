"""Handlers for the torch functions that create complex tensors, for devices without complex dtypes."""

from __future__ import annotations

from typing import Any

import torch

from anyaccel.backends.device_type_checks import is_on
from anyaccel.runtime.workarounds.complex_pairs import ComplexPair, apply_to_parts, make_complex_pair, split_joined
from anyaccel.runtime.workarounds.dtypes import (
    DATA_CONSTRUCTORS,
    find_target_device,
    normalize_new_tensor,
    parse_to_arguments,
)
from anyaccel.runtime.workarounds.out_argument import supporting_out
from anyaccel.upstream.torch_internals import pad_sequence

__all__ = ["make_handlers"]

Tensor = torch.Tensor
_FACTORIES = (torch.zeros, torch.ones, torch.empty, torch.full)
_LIKE_FACTORIES = {torch.zeros_like: torch.zeros, torch.ones_like: torch.ones, torch.empty_like: torch.empty}
# Parameters of `torch.complex` and `torch.polar`, in their order.
_PART_NAMES = ("real", "abs", "imag", "angle")
_FFT_FUNCTIONS = tuple(
    getattr(torch.fft, name)
    for name in ("fft", "ifft", "fft2", "ifft2", "fftn", "ifftn", "rfft", "irfft", "rfft2", "irfft2", "rfftn", "irfftn")
)


def make_handlers(device: torch.device, inner: dict[Any, Any]) -> dict[Any, Any]:
    """Return handlers for the torch functions that can create a complex tensor on the device.

    If the result is not complex, a handler calls the function's handler in `inner` instead.
    """
    factory = _PairFactory(device.type, inner)

    handlers = dict(inner)
    handlers |= {pad_sequence: factory.pad}
    handlers |= dict.fromkeys((torch.view_as_complex, torch.complex, torch.polar), supporting_out(factory.join))
    handlers |= dict.fromkeys((*_FACTORIES, *_LIKE_FACTORIES), factory.create)
    handlers |= dict.fromkeys(DATA_CONSTRUCTORS, factory.build)
    handlers |= dict.fromkeys(_FFT_FUNCTIONS, supporting_out(factory.transform))
    return handlers | {Tensor.to: factory.move}


class _PairFactory:
    """Handlers that create a `ComplexPair` instead of a complex tensor on the device."""

    def __init__(self, device_type: str, inner: dict[Any, Any]) -> None:
        self.device_type, self.inner = device_type, inner

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function's handler in `inner`, or the function itself if it has no handler."""
        handler = self.inner.get(func)
        return handler(func, args, kwargs) if handler is not None else func(*args, **kwargs)

    def join(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `view_as_complex`, `complex` or `polar`; return a `ComplexPair` for device tensors."""
        parts = (*args, *(kwargs[name] for name in _PART_NAMES if name in kwargs))
        return _join(func, parts) if is_on(parts[0].device, self.device_type) else func(*args, **kwargs)

    def pad(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `pad_sequence`; for `ComplexPair` inputs, pad the real and imaginary tensors separately."""
        if isinstance(args[0][0], ComplexPair):
            return apply_to_parts(func, args, kwargs)
        return self.call(func, args, kwargs)

    def create(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a factory function such as `torch.zeros`; return a complex result as a `ComplexPair`."""
        target = find_target_device(args[0] if args else None, kwargs)
        if target.type != self.device_type or not _creates_complex(func, args, kwargs):
            return self.call(func, args, kwargs)
        if func in _LIKE_FACTORIES:
            func, args = _LIKE_FACTORIES[func], (args[0].shape,)
        tensor = func(*args, **{**kwargs, "device": "cpu"})
        return make_complex_pair(torch.zeros_like(tensor) if func is torch.empty else tensor, target)

    def build(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Build a tensor from Python or NumPy data; return a complex result as a `ComplexPair`."""
        func, args, kwargs = normalize_new_tensor(func, args, kwargs)
        data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        target = find_target_device(data, kwargs)
        if target.type != self.device_type or (isinstance(data, Tensor) and is_on(data.device, self.device_type)):
            return self.call(func, args, kwargs)
        tensor = func(*args, **{**kwargs, "device": "cpu"})
        return make_complex_pair(tensor, target) if tensor.is_complex() else self.call(func, args, kwargs)

    def move(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `tensor.to(…)`; return a complex result on the device as a `ComplexPair`."""
        tensor = args[0]
        if isinstance(tensor, ComplexPair):
            return func(*args, **kwargs)
        target, dtype = parse_to_arguments(tensor, args[1:], kwargs)
        if target.type != self.device_type or not dtype.is_complex:
            return self.call(func, args, kwargs)
        real, imaginary = (tensor.real, tensor.imag) if tensor.is_complex() else (tensor, torch.zeros_like(tensor))
        # Copies: without one, changes of the pair would change a float32 tensor on the device.
        parts = (part.to(target, torch.float32, copy=True) for part in (real, imaginary))
        return ComplexPair(*parts)

    def transform(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a Fourier transform on the CPU and copy the result back to the device."""
        if args[0].device.type != self.device_type:
            return func(*args, **kwargs)
        result = func(args[0].cpu(), *args[1:], **kwargs)
        if not result.is_complex():
            return result.to(args[0].device)
        return split_joined(torch.view_as_real(result.resolve_conj()).float().to(args[0].device))


def _creates_complex(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a factory function creates a complex tensor, based on its dtype or fill value."""
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return bool(dtype.is_complex)
    return func is torch.full and isinstance(args[1] if len(args) > 1 else kwargs.get("fill_value"), complex)


def _join(func: Any, parts: tuple[Tensor, ...]) -> ComplexPair:
    """Compute `view_as_complex`, `complex` or `polar` for device tensors; return a `ComplexPair`."""
    if func is torch.view_as_complex:
        return split_joined(parts[0])
    first, second = parts
    if func is torch.complex:
        shape = torch.broadcast_shapes(first.shape, second.shape)
        return ComplexPair(first.expand(shape).clone(), second.expand(shape).clone())
    return ComplexPair(first * torch.cos(second), first * torch.sin(second))
