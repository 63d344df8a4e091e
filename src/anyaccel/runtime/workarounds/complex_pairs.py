"""Complex tensors stored as two real tensors, for devices without complex dtypes.

Rotary embeddings often use complex numbers. A `ComplexPair` behaves like a complex tensor, but each
operation runs on its real and imaginary tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from anyaccel.backends.device_type_checks import is_host
from anyaccel.errors import LimitError
from anyaccel.upstream.torch_autograd_internals import record_below_wrapper, resume_autograd
from anyaccel.upstream.torch_internals import (
    can_decompose,
    exclude_dispatch_key,
    make_wrapper_subclass,
    read_schema,
    read_version,
    skip_subclass_functions,
    tree_map,
)

__all__ = ["ComplexPair", "apply_to_parts", "make_complex_pair", "split_joined"]

# Gaudi rejects complex dtypes (https://github.com/vllm-project/vllm-gaudi/pull/1617), and so does the Neuron compiler
# (NCC_EVRF004, https://awsdocs-neuron.readthedocs-hosted.com/en/latest/compiler/error-codes/index.html). diffusers
# avoids complex arithmetic on MLU too (https://github.com/huggingface/diffusers/pull/13824). Computing the embeddings
# on the CPU instead would cost one device-to-host copy per layer.

Tensor = torch.Tensor
aten = torch.ops.aten
_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)
_SELECTIONS = (torch.where, Tensor.where)


class ComplexPair(Tensor):
    """A complex64 tensor stored as two float32 tensors on the device."""

    _parts: tuple[Tensor, Tensor]
    joined: Tensor | None
    """The tensor with both parts in its last dimension, if the parts are views of one."""
    copies: list[tuple[Tensor, int]]
    """Copies that `view_as_real` has returned, and their versions; views of a pair have the same list."""

    @staticmethod
    def __new__(cls: type[ComplexPair], real: Tensor, imaginary: Tensor) -> ComplexPair:
        """Create a complex64 tensor that refers to two real tensors and has no storage of its own."""
        # In inference mode, a view of a normal tensor is a normal tensor. Its wrapper must be one too.
        needs_normal_tensor = torch.is_inference_mode_enabled() and not real.is_inference()
        with torch.inference_mode(False) if needs_normal_tensor else nullcontext():
            pair: ComplexPair = make_wrapper_subclass(cls, real.shape, dtype=torch.complex64, device=real.device)
        pair._parts, pair.joined, pair.copies = (real, imaginary), None, []
        return pair

    real_part = property(lambda self: self._read_parts()[0], doc="The real tensor.")
    imaginary_part = property(lambda self: self._read_parts()[1], doc="The imaginary tensor.")
    # torch's own properties read and write `view_as_real(tensor)`, and the setters call no function mode.
    real = property(lambda self: self.real_part, lambda self, value: self.real_part.copy_(value))
    imag = property(lambda self: self.imaginary_part, lambda self, value: self.imaginary_part.copy_(value))

    @property
    def data(self) -> Tensor:
        """The tensor without its history; a tensor that is assigned must also be complex and of the same shape."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, ComplexPair) or value.shape != self.shape:
            raise LimitError(
                "the device does not support complex dtypes, and anyaccel cannot assign this tensor to `.data`",
                hint="assign the new tensor to the variable instead",
            )
        self._parts, self.joined, self.copies = value._read_parts(), value.joined, value.copies

    def _read_parts(self) -> tuple[Tensor, Tensor]:
        """Return the parts; raise `LimitError` if a copy was changed that is a view of a complex tensor elsewhere."""
        if any(read_version(copy) != version for copy, version in self.copies):
            raise LimitError(
                "the device does not support complex dtypes, and anyaccel has no real-valued replacement for in-place "
                "changes of this tensor through torch.view_as_real",
                hint="change tensor.real and tensor.imag instead",
            )
        return self._parts

    def tolist(self) -> Any:
        """Return the values as a nested list."""
        return torch.Tensor.cpu(self).tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Pair({tuple(self.shape)}, device={self.device})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a torch function without recording it for the pair, because autograd records it for the two parts."""
        with skip_subclass_functions():
            if func in _INDEXING:
                index = _read_lists(args[1], args[0].device)
                args = (args[0], index, *(_convert_number(value, args[0].device) for value in args[2:]))
            elif func in _SELECTIONS:
                args = (args[0], *(_convert_number(value, args[0].device) for value in args[1:]))
            if func in _VIEW_FUNCTIONS:  # in dispatch, the parts arrive as `view_as_real`, and views share its version
                return _VIEW_FUNCTIONS[func](args[0] if args else kwargs["input"])
            with record_below_wrapper() if torch.is_grad_enabled() else nullcontext():
                return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run one operation on the real and imaginary tensors; raise `LimitError` if it is not supported."""
        kwargs = kwargs or {}
        if any(argument.is_out for argument in read_schema(func).arguments):
            return _write_out(func, args, kwargs)
        special = _SPECIAL.get(func.overloadpacket, apply_to_parts if func.overloadpacket in _PARTWISE else None)
        if special is not None:
            with resume_autograd() if torch.is_grad_enabled() else nullcontext():
                return special(func, args, kwargs)
        if can_decompose(func):  # without autograd kernels, composite operations arrive here as a whole
            return _decompose(func, args, kwargs)
        raise _make_error(func)


def _convert_number(value: Any, device: torch.device) -> Any:
    """Return a `ComplexPair` for a number, for functions that would create a complex tensor on the device from it."""
    if not isinstance(value, int | float | complex):
        return value
    return make_complex_pair(torch.tensor(value, dtype=torch.complex64), device)


def _read_lists(index: Any, device: torch.device) -> Any:
    """Replace the lists in an index, and tuples inside of it, by tensors; lists cause an internal error of torch."""
    if isinstance(index, tuple):
        return tuple(_read_lists(list(entry) if isinstance(entry, tuple) else entry, device) for entry in index)
    has_numbers = isinstance(index, list) and not any(isinstance(entry, Tensor) for entry in index)
    return torch.tensor(index, device=device) if has_numbers else index


def _decompose(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a composite operation as several operations, some of which may have an ordinary tensor as their result."""
    with resume_autograd() if torch.is_grad_enabled() else nullcontext(), exclude_dispatch_key("ADInplaceOrView"):
        result = func.decompose(*args, **kwargs)
    if isinstance(result, ComplexPair) and result.requires_grad:
        raise _make_error(func, "derivative")  # its history belongs to the parts
    return result


def _write_out(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation with `out=`, and copy its result into this tensor."""
    if "out" not in kwargs:  # several results
        raise _make_error(func)
    result = func.overloadpacket(*args, **{name: value for name, value in kwargs.items() if name != "out"})
    if kwargs["out"].shape != result.shape or kwargs["out"].is_complex() != result.is_complex():
        raise _make_error(func)
    return kwargs["out"].copy_(result)


def _make_error(func: Any, missing: str = "replacement") -> LimitError:
    return LimitError(
        f"the device does not support complex dtypes, and anyaccel has no real-valued {missing} for "
        f"{func.overloadpacket}",
        hint="run the model on a different device, and report the model and the operation to anyaccel",
    )


def make_complex_pair(tensor: Tensor, device: torch.device | str) -> ComplexPair:
    """Copy a complex CPU tensor to a device as a `ComplexPair` of two float32 tensors."""
    return ComplexPair(tensor.real.float().to(device), tensor.imag.float().to(device))


def split_joined(joined: Tensor) -> ComplexPair:
    """Return the `ComplexPair` of a tensor with the real and imaginary parts in its last dimension."""
    pair = ComplexPair(joined[..., 0], joined[..., 1])
    pair.joined = joined
    return pair


def _view_as_real(pair: ComplexPair) -> Tensor:
    """Return the tensor of which the parts are views, or else a copy, which must not be changed."""
    if pair.joined is not None:
        return pair.joined
    # Inference tensors have no version counter: https://github.com/pytorch/pytorch/pull/54403
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        copy = torch.stack([pair.real_part, pair.imaginary_part], dim=-1)
    pair.copies.append((copy, read_version(copy)))
    return copy


# Functions of which the result is a view of the parts.
_VIEW_FUNCTIONS: dict[Any, Callable[[ComplexPair], Tensor]] = {
    torch.view_as_real: _view_as_real,
    torch.real: lambda pair: pair.real_part,
    torch.imag: lambda pair: pair.imaginary_part,
}


def apply_to_parts(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation separately on the real and imaginary tensors; return `ComplexPair` results."""
    results = []
    for attribute in ("real_part", "imaginary_part"):
        select = _make_selector(attribute)
        results.append(func(*tree_map(select, args), **tree_map(select, kwargs)))
    if isinstance(results[0], Tensor):
        return _share_copies(func, args, ComplexPair(results[0], results[1]))
    pairs = [_share_copies(func, args, ComplexPair(*parts)) for parts in zip(*results, strict=True)]
    return type(results[0])(pairs)


def _share_copies(func: Any, args: Any, pair: ComplexPair) -> ComplexPair:
    if getattr(func, "overloadpacket", None) in _VIEWS:
        pair.copies = args[0].copies
    return pair


def _reshape(func: Any, args: Any, kwargs: Any) -> ComplexPair:
    # The wrapper is always contiguous, its parts may not be: `view` is valid for the wrapper but not for them.
    pair, shape = args[0], args[1]
    reshaped = ComplexPair(pair.real_part.reshape(shape), pair.imaginary_part.reshape(shape))
    return _share_copies(func, args, reshaped)


def _make_selector(attribute: str) -> Callable[[Any], Any]:
    """Return a function that replaces a `ComplexPair` with its real or imaginary tensor.

    The function also replaces complex dtypes with float32 and returns other values unchanged.
    """

    def select(value: Any) -> Any:
        if value is torch.complex64 or value is torch.complex128:
            return torch.float32
        return getattr(value, attribute) if isinstance(value, ComplexPair) else value

    return select


def _split_parts(value: Any) -> tuple[Any, Any]:
    """Return the real and imaginary parts of a `ComplexPair`, a scalar or a tensor."""
    if isinstance(value, ComplexPair):
        return value.real_part, value.imaginary_part
    if isinstance(value, complex):
        return value.real, value.imag
    if isinstance(value, Tensor) and value.is_complex():  # torch wraps a Python complex in a 0-dim CPU tensor
        return value.real, value.imag
    return value, 0.0


def _multiply(func: Any, args: Any, kwargs: Any) -> ComplexPair:
    (a, b), (c, d) = _split_parts(args[0]), _split_parts(args[1])
    if not isinstance(args[1], ComplexPair) and not isinstance(d, Tensor) and d == 0:
        return ComplexPair(a * c, b * c)
    if not isinstance(args[0], ComplexPair) and not isinstance(b, Tensor) and b == 0:
        return ComplexPair(a * c, a * d)
    return ComplexPair(a * c - b * d, a * d + b * c)


def _divide(func: Any, args: Any, kwargs: Any) -> ComplexPair:
    (a, b), (c, d) = _split_parts(args[0]), _split_parts(args[1])
    if not isinstance(d, Tensor) and d == 0:
        return ComplexPair(a / c, b / c)
    norm = c * c + d * d
    return ComplexPair((a * c + b * d) / norm, (b * c - a * d) / norm)


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Copy or cast a `ComplexPair`; a copy on the CPU is an ordinary complex tensor.

    A cast to a real dtype drops the imaginary part.
    """
    pair, target, dtype = args[0], kwargs.get("device"), kwargs.get("dtype")
    if target is not None and is_host(torch.device(target)):
        joined = torch.complex(pair.real_part.cpu(), pair.imaginary_part.cpu())
        return joined if dtype is None else joined.to(dtype)
    if dtype is not None and not dtype.is_complex:
        return pair.real_part.to(dtype, copy=True)
    return ComplexPair(pair.real_part.clone(), pair.imaginary_part.clone())


def _write(func: Any, args: Any, kwargs: Any) -> Any:
    """Run `tensor.copy_(other)` for a `ComplexPair`, as in `pair[…] = other`.

    Writing to a view also changes the original tensor, because they share storage.
    """
    target, (real, imaginary) = args[0], _split_parts(args[1])
    if not isinstance(target, ComplexPair):  # the target is a complex CPU tensor
        return target.copy_(torch.complex(real.cpu(), imaginary.cpu()))
    target.real_part.copy_(real) if isinstance(real, Tensor) else target.real_part.fill_(real)
    target.imaginary_part.copy_(imaginary) if isinstance(imaginary, Tensor) else target.imaginary_part.fill_(imaginary)
    return target


def _fill(func: Any, args: Any, kwargs: Any) -> Any:
    pair, (real, imaginary) = args[0], _split_parts(args[1])
    pair.real_part.fill_(real)
    pair.imaginary_part.fill_(imaginary)
    return pair


def _index_put(func: Any, args: Any, kwargs: Any) -> Any:
    pair, indices, (real, imaginary) = args[0], args[1], _split_parts(args[2])
    imaginary = imaginary if isinstance(imaginary, Tensor) else torch.zeros_like(real)
    func(pair.real_part, indices, real.to(pair.device), *args[3:], **kwargs)
    func(pair.imaginary_part, indices, imaginary.to(pair.device), *args[3:], **kwargs)
    return pair


def _add(func: Any, args: Any, kwargs: Any) -> ComplexPair:
    (a, b), (c, d) = _split_parts(args[0]), _split_parts(args[1])
    factor = kwargs.get("alpha", 1) * (-1 if func.overloadpacket is aten.sub else 1)
    return _broadcast_parts(a + c * factor, b + d * factor)


def _broadcast_parts(real: Tensor, imaginary: Tensor) -> ComplexPair:
    """Return a `ComplexPair` of the real and imaginary tensors, broadcast to the same shape."""
    shape = torch.broadcast_shapes(real.shape, imaginary.shape)
    return ComplexPair(*(part if part.shape == shape else part.expand(shape).clone() for part in (real, imaginary)))


def _split_all(values: Any) -> tuple[list[Any], list[Any]]:
    """Return the real parts and the imaginary parts of several values, with zeros for real tensors."""
    parts = [_split_parts(value) for value in values]
    reals = [real for real, _ in parts]
    return reals, [torch.zeros_like(a) if isinstance(a, Tensor) and not isinstance(b, Tensor) else b for a, b in parts]


def _concatenate(func: Any, args: Any, kwargs: Any) -> ComplexPair:
    reals, imaginaries = _split_all(args[0])
    return ComplexPair(func(reals, *args[1:], **kwargs), func(imaginaries, *args[1:], **kwargs))


def _where(func: Any, args: Any, kwargs: Any) -> ComplexPair:
    reals, imaginaries = _split_all(args[1:])
    return ComplexPair(func(args[0], *reals), func(args[0], *imaginaries))


def _pad(func: Any, args: Any, kwargs: Any) -> ComplexPair:
    pair, sizes, (real, imaginary) = args[0], args[1], _split_parts(args[2] if len(args) > 2 else 0.0)
    return ComplexPair(func(pair.real_part, sizes, real), func(pair.imaginary_part, sizes, imaginary))


def _stride(func: Any, args: Any, kwargs: Any) -> ComplexPair:
    # The strides refer to the contiguous wrapper, so the parts must be contiguous too.
    pair = args[0]
    return ComplexPair(func(pair.real_part.contiguous(), *args[1:]), func(pair.imaginary_part.contiguous(), *args[1:]))


def _ones_like(func: Any, args: Any, kwargs: Any) -> ComplexPair:
    select = _make_selector("real_part")
    return ComplexPair(func(*tree_map(select, args), **tree_map(select, kwargs)), torch.zeros_like(args[0].real_part))


# Operations that mix the parts or need another operation per part.
_SPECIAL: dict[Any, Callable[[Any, Any, Any], Any]] = {
    aten.mul: _multiply,
    aten.div: _divide,
    aten.add: _add,
    aten.sub: _add,
    aten.cat: _concatenate,
    aten.stack: _concatenate,
    aten.where: _where,
    aten.constant_pad_nd: _pad,
    aten.as_strided: _stride,
    aten._to_copy: _copy,
    aten.copy_: _write,
    aten.fill_: _fill,
    aten.index_put_: _index_put,
    aten.view: _reshape,
    aten._unsafe_view: _reshape,
    aten._reshape_alias: _reshape,
    aten.ones_like: _ones_like,
    aten.view_as_real: lambda func, args, kwargs: torch.stack([args[0].real_part, args[0].imaginary_part], dim=-1),
    aten._conj: lambda func, args, kwargs: ComplexPair(args[0].real_part, -args[0].imaginary_part),
    aten._conj_physical: lambda func, args, kwargs: ComplexPair(args[0].real_part.clone(), -args[0].imaginary_part),
    aten.conj_physical: lambda func, args, kwargs: ComplexPair(args[0].real_part.clone(), -args[0].imaginary_part),
    aten.real: lambda func, args, kwargs: args[0].real_part,
    aten.imag: lambda func, args, kwargs: args[0].imaginary_part,
    aten.abs: lambda func, args, kwargs: torch.hypot(args[0].real_part, args[0].imaginary_part),
    aten.angle: lambda func, args, kwargs: torch.atan2(args[0].imaginary_part, args[0].real_part),
    aten._local_scalar_dense: lambda func, args, kwargs: complex(
        args[0].real_part.item(), args[0].imaginary_part.item()
    ),
}
# Operations that run on each part unchanged.
_PARTWISE = {
    aten.alias, aten.clone, aten.contiguous, aten.cumsum, aten.detach, aten.empty_like, aten.expand, aten.flatten,
    aten.flip, aten.gather, aten.index, aten.index_select, aten.lift_fresh, aten.mean, aten.neg, aten.new_empty,
    aten.new_zeros, aten.permute, aten.repeat, aten.reshape, aten.roll, aten.select, aten.slice, aten.split,
    aten.split_with_sizes, aten.squeeze, aten.sum, aten.t, aten.transpose, aten.unbind, aten.unfold, aten.unsqueeze,
    aten.zeros_like, aten.empty_strided, aten.new_empty_strided,
}  # fmt: skip
# Operations of which the result is a view.
_VIEWS = {
    aten.alias, aten.detach, aten.expand, aten.permute, aten.select, aten.slice, aten.split, aten.split_with_sizes,
    aten.squeeze, aten.t, aten.transpose, aten.unbind, aten.unfold, aten.unsqueeze, aten.view, aten._reshape_alias,
}  # fmt: skip
