"""Complex numbers on devices that have none: two real tensors, one for each part.

Rotary embeddings are often written with complex numbers. A `Pair` looks like a complex tensor of the device to the code
that holds it, and every operation on it is one on its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from anyaccel.errors import LimitError

__all__ = ["Pair", "make_handlers", "make_pair"]

Tensor = torch.Tensor
aten = torch.ops.aten
_FACTORIES = (torch.zeros, torch.ones, torch.empty, torch.full)
_LIKE = (torch.zeros_like, torch.ones_like, torch.empty_like)
_TRANSFORMS = tuple(
    getattr(torch.fft, name)
    for name in ("fft", "ifft", "fft2", "ifft2", "fftn", "ifftn", "rfft", "irfft", "rfft2", "irfft2", "rfftn", "irfftn")
)


class Pair(Tensor):
    """A complex tensor as its real and its imaginary part, both on the device."""

    real_part: Tensor
    imaginary_part: Tensor

    @staticmethod
    def __new__(cls: type[Pair], real: Tensor, imaginary: Tensor) -> Pair:
        """A wrapper without memory of its own."""
        made = Tensor._make_wrapper_subclass(cls, real.shape, dtype=torch.complex64, device=real.device)
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


def make_pair(tensor: Tensor, device: torch.device | str) -> Pair:
    """A complex tensor of the host as a pair on a device."""
    return Pair(tensor.real.float().to(device), tensor.imag.float().to(device))


def _each(func: Any, args: Any, kwargs: Any) -> Any:
    """The operation on the real parts, and on the imaginary ones; gives a pair, or a list of pairs."""
    parts = []
    for part in ("real_part", "imaginary_part"):
        take = _take(part)
        parts.append(func(*tree_map(take, args), **tree_map(take, kwargs)))
    if isinstance(parts[0], Tensor):
        return Pair(parts[0], parts[1])
    return type(parts[0])([Pair(real, imaginary) for real, imaginary in zip(*parts, strict=True)])


def _reshape(func: Any, args: Any, kwargs: Any) -> Pair:
    """A view of the wrapper may need a copy of its parts, which lie in memory as they came."""
    pair, shape = args[0], args[1]
    return Pair(pair.real_part.reshape(shape), pair.imaginary_part.reshape(shape))


def _take(part: str) -> Callable[[Any], Any]:
    def take(value: Any) -> Any:
        if value is torch.complex64 or value is torch.complex128:
            return torch.float32
        return getattr(value, part) if isinstance(value, Pair) else value

    return take


def _parts_of(value: Any) -> tuple[Any, Any]:
    """The two parts of a pair, a number or a real tensor."""
    if isinstance(value, Pair):
        return value.real_part, value.imaginary_part
    if isinstance(value, complex):
        return value.real, value.imag
    if isinstance(value, Tensor) and value.is_complex():  # a single number of the host
        return value.real, value.imag
    return value, 0.0


def _multiply(func: Any, args: Any, kwargs: Any) -> Pair:
    (a, b), (c, d) = _parts_of(args[0]), _parts_of(args[1])
    if not isinstance(args[1], Pair) and not isinstance(d, Tensor) and d == 0:
        return Pair(a * c, b * c)
    if not isinstance(args[0], Pair) and not isinstance(b, Tensor) and b == 0:
        return Pair(a * c, a * d)
    return Pair(a * c - b * d, a * d + b * c)


def _divide(func: Any, args: Any, kwargs: Any) -> Pair:
    (a, b), (c, d) = _parts_of(args[0]), _parts_of(args[1])
    if not isinstance(args[1], Pair):
        return Pair(a / c, b / c)
    length = c * c + d * d
    return Pair((a * c + b * d) / length, (b * c - a * d) / length)


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    """`pair.to(…)`: to the host it becomes a complex tensor again; to a real type its real part stays."""
    pair, target, kind = args[0], kwargs.get("device"), kwargs.get("dtype")
    if target is not None and torch.device(target).type == "cpu":
        joined = torch.complex(pair.real_part.cpu(), pair.imaginary_part.cpu())
        return joined if kind is None else joined.to(kind)
    if kind is not None and not kind.is_complex:
        return pair.real_part.to(kind)
    return Pair(pair.real_part.clone(), pair.imaginary_part.clone())


def _write(func: Any, args: Any, kwargs: Any) -> Any:
    """`pair[…] = other`: a view of the pair shares its parts, so that writing to them writes to it."""
    target, (real, imaginary) = args[0], _parts_of(args[1])
    if not isinstance(target, Pair):  # to a complex tensor of the host
        return target.copy_(torch.complex(real.cpu(), imaginary.cpu()))
    target.real_part.copy_(real) if isinstance(real, Tensor) else target.real_part.fill_(real)
    target.imaginary_part.copy_(imaginary) if isinstance(imaginary, Tensor) else target.imaginary_part.fill_(imaginary)
    return target


def _fill(func: Any, args: Any, kwargs: Any) -> Any:
    pair, (real, imaginary) = args[0], _parts_of(args[1])
    pair.real_part.fill_(real)
    pair.imaginary_part.fill_(imaginary)
    return pair


def _add(func: Any, args: Any, kwargs: Any) -> Pair:
    (a, b), (c, d) = _parts_of(args[0]), _parts_of(args[1])
    return Pair(func(a, c, **kwargs), func(b, d, **kwargs) if isinstance(b, Tensor) else func(torch.zeros_like(d), d))


def _of_ones(func: Any, args: Any, kwargs: Any) -> Pair:
    real = _take("real_part")
    return Pair(func(*tree_map(real, args), **tree_map(real, kwargs)), torch.zeros_like(args[0].real_part))


_SPECIAL: dict[Any, Callable[[Any, Any, Any], Any]] = {
    aten.mul: _multiply,
    aten.div: _divide,
    aten.add: _add,
    aten.sub: _add,
    aten._to_copy: _copy,
    aten.copy_: _write,
    aten.fill_: _fill,
    aten.view: _reshape,
    aten._unsafe_view: _reshape,
    aten._reshape_alias: _reshape,
    aten.ones_like: _of_ones,
    aten.view_as_real: lambda func, args, kwargs: torch.stack([args[0].real_part, args[0].imaginary_part], dim=-1),
    aten._conj: lambda func, args, kwargs: Pair(args[0].real_part, -args[0].imaginary_part),
    aten._conj_physical: lambda func, args, kwargs: Pair(args[0].real_part, -args[0].imaginary_part),
    aten.conj_physical: lambda func, args, kwargs: Pair(args[0].real_part, -args[0].imaginary_part),
    aten.abs: lambda func, args, kwargs: torch.hypot(args[0].real_part, args[0].imaginary_part),
    aten.angle: lambda func, args, kwargs: torch.atan2(args[0].imaginary_part, args[0].real_part),
    aten._local_scalar_dense: lambda func, args, kwargs: complex(
        args[0].real_part.item(), args[0].imaginary_part.item()
    ),
}
_PARTWISE = {
    aten.alias, aten.as_strided, aten.cat, aten.clone, aten.constant_pad_nd, aten.contiguous, aten.cumsum, aten.detach,
    aten.empty_like, aten.expand, aten.flatten, aten.flip, aten.gather, aten.index, aten.index_select, aten.lift_fresh,
    aten.mean, aten.neg, aten.new_empty, aten.new_zeros, aten.permute, aten.repeat, aten.reshape, aten.roll,
    aten.select, aten.slice, aten.split, aten.split_with_sizes, aten.squeeze, aten.stack, aten.sum, aten.t,
    aten.transpose, aten.unbind, aten.unfold, aten.unsqueeze,
    aten.zeros_like, aten.where, aten.empty_strided, aten.new_empty_strided,
}  # fmt: skip


def make_handlers(device: torch.device, inner: dict[Any, Any]) -> dict[Any, Any]:
    """Handlers for every function that would make a complex tensor on the device; `inner` runs behind them."""
    kind = device.type

    def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handler = inner.get(func)
        return handler(func, args, kwargs) if handler is not None else func(*args, **kwargs)

    def join(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _join(func, args, kwargs) if args[0].device.type == kind else func(*args, **kwargs)

    def make(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        asked, place = kwargs.get("dtype"), kwargs.get("device")
        if asked is None or not asked.is_complex or place is None or torch.device(place).type != kind:
            return call(func, args, kwargs)
        host = func(*args, **{**kwargs, "device": "cpu"})
        return make_pair(torch.zeros_like(host) if func is torch.empty else host, place)

    def move(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if isinstance(tensor, Pair) or not tensor.is_complex():
            return func(*args, **kwargs) if isinstance(tensor, Pair) else call(func, args, kwargs)
        asked = kwargs.get("device", next((v for v in args[1:] if isinstance(v, str | torch.device)), None))
        other = next((v for v in args[1:] if isinstance(v, Tensor)), None)
        target = other.device if other is not None else None if asked is None else torch.device(asked)
        there = target is not None and target.type == kind
        return make_pair(tensor, target) if there and target is not None else call(func, args, kwargs)

    def transform(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args[0].device.type != kind:
            return func(*args, **kwargs)
        result = func(args[0].cpu(), *args[1:], **kwargs)
        return make_pair(result, args[0].device) if result.is_complex() else result.to(args[0].device)

    def pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # It makes the padded tensor itself, before it looks at what it is given.
        return _each(func, args, kwargs) if isinstance(args[0][0], Pair) else call(func, args, kwargs)

    handlers = dict(inner)
    handlers |= {torch._C._nn.pad_sequence: pad}
    handlers |= dict.fromkeys((torch.view_as_complex, torch.complex, torch.polar), join)
    handlers |= dict.fromkeys((*_FACTORIES, *_LIKE), make)
    handlers |= dict.fromkeys(_TRANSFORMS, transform)
    return handlers | {Tensor.to: move}


def _join(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pair:
    """`view_as_complex`, `complex` and `polar` on the device."""
    if func is torch.view_as_complex:
        return Pair(args[0][..., 0], args[0][..., 1])
    first, second = args[0], args[1] if len(args) > 1 else next(iter(kwargs.values()))
    if func is torch.complex:
        return Pair(first, second)
    return Pair(first * torch.cos(second), first * torch.sin(second))
