"""Complex numbers on devices that have none: two real tensors, one for each part.

Rotary embeddings are often written with complex numbers. A `ComplexPair` behaves like a complex tensor to the code
that uses it; every operation on it is one on its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anyaccel.backends.torch_device import is_host, is_on
from anyaccel.errors import LimitError
from anyaccel.runtime.workarounds.dtypes import (
    DATA_CONSTRUCTORS,
    find_target_device,
    normalize_new_tensor,
    parse_to_arguments,
)
from anyaccel.upstream.torch_internals import make_wrapper_subclass, pad_sequence, tree_map

__all__ = ["ComplexPair", "make_complex_pair", "make_handlers"]

Tensor = torch.Tensor
aten = torch.ops.aten
_FACTORIES = (torch.zeros, torch.ones, torch.empty, torch.full)
_ALIKE = {torch.zeros_like: torch.zeros, torch.ones_like: torch.ones, torch.empty_like: torch.empty}
_TRANSFORMS = tuple(
    getattr(torch.fft, name)
    for name in ("fft", "ifft", "fft2", "ifft2", "fftn", "ifftn", "rfft", "irfft", "rfft2", "irfft2", "rfftn", "irfftn")
)


class ComplexPair(Tensor):
    """A complex tensor as its real and its imaginary part, both on the device."""

    real_part: Tensor
    imaginary_part: Tensor

    @staticmethod
    def __new__(cls: type[ComplexPair], real: Tensor, imaginary: Tensor) -> ComplexPair:
        """A wrapper without memory of its own."""
        made: ComplexPair = make_wrapper_subclass(cls, real.shape, dtype=torch.complex64, device=real.device)
        made.real_part, made.imaginary_part = real, imaginary
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Pair({tuple(self.shape)}, device={self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """One operation: one of the few that mix the parts, or the same one on each part."""
        kwargs = kwargs or {}
        special = _SPECIAL.get(func.overloadpacket)
        if special is not None:
            return special(func, args, kwargs)
        if func.overloadpacket not in _PARTWISE:
            raise LimitError(
                f"this device has no complex numbers, and {func.overloadpacket} is not known on pairs of real ones",
                hint="tell us which model it was; until then run it on another device",
            )
        return _each(func, args, kwargs)


def make_complex_pair(tensor: Tensor, device: torch.device | str) -> ComplexPair:
    """A complex tensor of the host as a pair on a device."""
    return ComplexPair(tensor.real.float().to(device), tensor.imag.float().to(device))


def _each(func: Any, args: Any, kwargs: Any) -> Any:
    """The operation on the real parts, and on the imaginary ones; gives a pair, or a list of pairs."""
    parts = []
    for part in ("real_part", "imaginary_part"):
        take = _take(part)
        parts.append(func(*tree_map(take, args), **tree_map(take, kwargs)))
    if isinstance(parts[0], Tensor):
        return ComplexPair(parts[0], parts[1])
    return type(parts[0])([ComplexPair(real, imaginary) for real, imaginary in zip(*parts, strict=True)])


def _reshape(func: Any, args: Any, kwargs: Any) -> ComplexPair:
    """A view of the wrapper may need a copy of its parts, which lie in memory as they came."""
    pair, shape = args[0], args[1]
    return ComplexPair(pair.real_part.reshape(shape), pair.imaginary_part.reshape(shape))


def _take(part: str) -> Callable[[Any], Any]:
    def take(value: Any) -> Any:
        if value is torch.complex64 or value is torch.complex128:
            return torch.float32
        return getattr(value, part) if isinstance(value, ComplexPair) else value

    return take


def _parts_of(value: Any) -> tuple[Any, Any]:
    """The two parts of a pair, a number or a real tensor."""
    if isinstance(value, ComplexPair):
        return value.real_part, value.imaginary_part
    if isinstance(value, complex):
        return value.real, value.imag
    if isinstance(value, Tensor) and value.is_complex():  # a single number of the host
        return value.real, value.imag
    return value, 0.0


def _multiply(func: Any, args: Any, kwargs: Any) -> ComplexPair:
    (a, b), (c, d) = _parts_of(args[0]), _parts_of(args[1])
    if not isinstance(args[1], ComplexPair) and not isinstance(d, Tensor) and d == 0:
        return ComplexPair(a * c, b * c)
    if not isinstance(args[0], ComplexPair) and not isinstance(b, Tensor) and b == 0:
        return ComplexPair(a * c, a * d)
    return ComplexPair(a * c - b * d, a * d + b * c)


def _divide(func: Any, args: Any, kwargs: Any) -> ComplexPair:
    (a, b), (c, d) = _parts_of(args[0]), _parts_of(args[1])
    if not isinstance(d, Tensor) and d == 0:
        return ComplexPair(a / c, b / c)
    length = c * c + d * d
    return ComplexPair((a * c + b * d) / length, (b * c - a * d) / length)


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    """`pair.to(…)`: to the host it becomes a complex tensor again; to a real type its real part stays."""
    pair, target, kind = args[0], kwargs.get("device"), kwargs.get("dtype")
    if target is not None and is_host(torch.device(target)):
        joined = torch.complex(pair.real_part.cpu(), pair.imaginary_part.cpu())
        return joined if kind is None else joined.to(kind)
    if kind is not None and not kind.is_complex:
        return pair.real_part.to(kind)
    return ComplexPair(pair.real_part.clone(), pair.imaginary_part.clone())


def _write(func: Any, args: Any, kwargs: Any) -> Any:
    """`pair[…] = other`: a view of the pair shares its parts, so that writing to them writes to it."""
    target, (real, imaginary) = args[0], _parts_of(args[1])
    if not isinstance(target, ComplexPair):  # to a complex tensor of the host
        return target.copy_(torch.complex(real.cpu(), imaginary.cpu()))
    target.real_part.copy_(real) if isinstance(real, Tensor) else target.real_part.fill_(real)
    target.imaginary_part.copy_(imaginary) if isinstance(imaginary, Tensor) else target.imaginary_part.fill_(imaginary)
    return target


def _fill(func: Any, args: Any, kwargs: Any) -> Any:
    pair, (real, imaginary) = args[0], _parts_of(args[1])
    pair.real_part.fill_(real)
    pair.imaginary_part.fill_(imaginary)
    return pair


def _add(func: Any, args: Any, kwargs: Any) -> ComplexPair:
    (a, b), (c, d) = _parts_of(args[0]), _parts_of(args[1])
    factor = kwargs.get("alpha", 1) * (-1 if func.overloadpacket is aten.sub else 1)
    return _join_parts(a + c * factor, b + d * factor)


def _join_parts(real: Tensor, imaginary: Tensor) -> ComplexPair:
    """A pair of parts that may have different sizes: the imaginary one of a real tensor is a number."""
    shape = torch.broadcast_shapes(real.shape, imaginary.shape)
    return ComplexPair(*(part if part.shape == shape else part.expand(shape).clone() for part in (real, imaginary)))


def _gather_parts(values: Any) -> tuple[list[Any], list[Any]]:
    """The real parts of several values, and their imaginary ones, which are zeros for real tensors."""
    parts = [_parts_of(value) for value in values]
    reals = [real for real, _ in parts]
    return reals, [torch.zeros_like(a) if isinstance(a, Tensor) and not isinstance(b, Tensor) else b for a, b in parts]


def _concatenate(func: Any, args: Any, kwargs: Any) -> ComplexPair:
    reals, imaginaries = _gather_parts(args[0])
    return ComplexPair(func(reals, *args[1:], **kwargs), func(imaginaries, *args[1:], **kwargs))


def _choose(func: Any, args: Any, kwargs: Any) -> ComplexPair:
    reals, imaginaries = _gather_parts(args[1:])
    return ComplexPair(func(args[0], *reals), func(args[0], *imaginaries))


def _pad(func: Any, args: Any, kwargs: Any) -> ComplexPair:
    pair, sizes, (real, imaginary) = args[0], args[1], _parts_of(args[2] if len(args) > 2 else 0.0)
    return ComplexPair(func(pair.real_part, sizes, real), func(pair.imaginary_part, sizes, imaginary))


def _stride(func: Any, args: Any, kwargs: Any) -> ComplexPair:
    """The strides are those of the wrapper, whose parts may lie in memory otherwise."""
    pair = args[0]
    return ComplexPair(func(pair.real_part.contiguous(), *args[1:]), func(pair.imaginary_part.contiguous(), *args[1:]))


def _of_ones(func: Any, args: Any, kwargs: Any) -> ComplexPair:
    real = _take("real_part")
    return ComplexPair(func(*tree_map(real, args), **tree_map(real, kwargs)), torch.zeros_like(args[0].real_part))


_SPECIAL: dict[Any, Callable[[Any, Any, Any], Any]] = {
    aten.mul: _multiply,
    aten.div: _divide,
    aten.add: _add,
    aten.sub: _add,
    aten.cat: _concatenate,
    aten.stack: _concatenate,
    aten.where: _choose,
    aten.constant_pad_nd: _pad,
    aten.as_strided: _stride,
    aten._to_copy: _copy,
    aten.copy_: _write,
    aten.fill_: _fill,
    aten.view: _reshape,
    aten._unsafe_view: _reshape,
    aten._reshape_alias: _reshape,
    aten.ones_like: _of_ones,
    aten.view_as_real: lambda func, args, kwargs: torch.stack([args[0].real_part, args[0].imaginary_part], dim=-1),
    aten._conj: lambda func, args, kwargs: ComplexPair(args[0].real_part, -args[0].imaginary_part),
    aten._conj_physical: lambda func, args, kwargs: ComplexPair(args[0].real_part, -args[0].imaginary_part),
    aten.conj_physical: lambda func, args, kwargs: ComplexPair(args[0].real_part, -args[0].imaginary_part),
    aten.abs: lambda func, args, kwargs: torch.hypot(args[0].real_part, args[0].imaginary_part),
    aten.angle: lambda func, args, kwargs: torch.atan2(args[0].imaginary_part, args[0].real_part),
    aten._local_scalar_dense: lambda func, args, kwargs: complex(
        args[0].real_part.item(), args[0].imaginary_part.item()
    ),
}
_PARTWISE = {
    aten.alias, aten.clone, aten.contiguous, aten.cumsum, aten.detach, aten.empty_like, aten.expand, aten.flatten,
    aten.flip, aten.gather, aten.index, aten.index_select, aten.lift_fresh, aten.mean, aten.neg, aten.new_empty,
    aten.new_zeros, aten.permute, aten.repeat, aten.reshape, aten.roll, aten.select, aten.slice, aten.split,
    aten.split_with_sizes, aten.squeeze, aten.sum, aten.t, aten.transpose, aten.unbind, aten.unfold, aten.unsqueeze,
    aten.zeros_like, aten.empty_strided, aten.new_empty_strided,
}  # fmt: skip


def make_handlers(device: torch.device, inner: dict[Any, Any]) -> dict[Any, Any]:
    """Handlers for every function that would make a complex tensor on the device; `inner` runs behind them."""
    making = _Making(device.type, inner)

    handlers = dict(inner)
    handlers |= {pad_sequence: making.pad}
    handlers |= dict.fromkeys((torch.view_as_complex, torch.complex, torch.polar), making.join)
    handlers |= dict.fromkeys((*_FACTORIES, *_ALIKE), making.make)
    handlers |= dict.fromkeys(DATA_CONSTRUCTORS, making.build)
    handlers |= dict.fromkeys(_TRANSFORMS, making.transform)
    return handlers | {Tensor.to: making.move}


class _Making:
    """Complex tensors that would arise on the device, made as pairs."""

    def __init__(self, kind: str, inner: dict[Any, Any]) -> None:
        self.kind, self.inner = kind, inner

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function, by way of the repair behind this one if there is one."""
        handler = self.inner.get(func)
        return handler(func, args, kwargs) if handler is not None else func(*args, **kwargs)

    def join(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """From two real tensors, or from one with both parts in it."""
        return _join(func, args, kwargs) if is_on(args[0].device, self.kind) else func(*args, **kwargs)

    def pad(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`pad_sequence` makes the padded tensor itself, before it looks at what it is given: each part by itself."""
        return _each(func, args, kwargs) if isinstance(args[0][0], ComplexPair) else self.call(func, args, kwargs)

    def make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A factory: made on the host."""
        place = find_target_device(args[0] if args else None, kwargs)
        if place.type != self.kind or not _asks_for_complex(func, args, kwargs):
            return self.call(func, args, kwargs)
        if func in _ALIKE:
            func, args = _ALIKE[func], (args[0].shape,)
        host = func(*args, **{**kwargs, "device": "cpu"})
        return make_complex_pair(torch.zeros_like(host) if func is torch.empty else host, place)

    def build(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A tensor from numbers or from NumPy."""
        func, args, kwargs = normalize_new_tensor(func, args, kwargs)
        data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        place = find_target_device(data, kwargs)
        if place.type != self.kind or (isinstance(data, Tensor) and is_on(data.device, self.kind)):
            return self.call(func, args, kwargs)
        host = func(*args, **{**kwargs, "device": "cpu"})
        return make_complex_pair(host, place) if host.is_complex() else self.call(func, args, kwargs)

    def move(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`tensor.to(…)`: to the device, or to a complex type there."""
        tensor = args[0]
        if isinstance(tensor, ComplexPair):
            return func(*args, **kwargs)
        target, dtype = parse_to_arguments(tensor, args[1:], kwargs)
        if target.type != self.kind or not dtype.is_complex:
            return self.call(func, args, kwargs)
        real, imaginary = (tensor.real, tensor.imag) if tensor.is_complex() else (tensor, torch.zeros_like(tensor))
        return ComplexPair(real.float().to(target), imaginary.float().to(target))

    def transform(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A Fourier transform: on the host."""
        if args[0].device.type != self.kind:
            return func(*args, **kwargs)
        result = func(args[0].cpu(), *args[1:], **kwargs)
        return make_complex_pair(result, args[0].device) if result.is_complex() else result.to(args[0].device)


def _asks_for_complex(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a factory will give complex numbers: by the type that is asked for, or by what it is filled with."""
    asked = kwargs.get("dtype")
    if asked is not None:
        return bool(asked.is_complex)
    return func is torch.full and isinstance(args[1] if len(args) > 1 else kwargs.get("fill_value"), complex)


def _join(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ComplexPair:
    """`view_as_complex`, `complex` and `polar` on the device."""
    if func is torch.view_as_complex:
        return ComplexPair(args[0][..., 0], args[0][..., 1])
    first, second = args[0], args[1] if len(args) > 1 else next(iter(kwargs.values()))
    if func is torch.complex:
        return _join_parts(first, second)
    return ComplexPair(first * torch.cos(second), first * torch.sin(second))
