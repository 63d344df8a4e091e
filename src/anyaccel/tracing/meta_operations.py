"""Operations on `meta` tensors: results are empty tensors, found without running an operation twice.

Models repeat their blocks, and torch's meta kernels are slow.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy
import torch

from anyaccel.backends.device_type_checks import is_host
from anyaccel.tracing.meta_layouts import Layout, find_layout
from anyaccel.upstream.torch_internals import read_schema

__all__ = ["is_channels_last", "make_zeros", "read_key", "run_operation"]


def run_operation(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation, or an empty tensor with the same layout."""
    substitute = _SUBSTITUTES.get(func)
    if substitute is not None and args[0].is_meta:
        return substitute(*args, **kwargs)
    return _run_once(func, args, kwargs)


# Layouts of results by operation and argument layouts.
_RESULTS: dict[Any, Layout | tuple[Layout, ...]] = {}


def _run_once(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation, or return an empty meta tensor if the result's layout is already cached."""
    key = None if _aliases(func) else read_key(func, args, kwargs)
    cached = _RESULTS.get(key) if key is not None else None
    if cached is not None:
        return _make_empty(cached)
    zeros = _skip(func, args, kwargs)
    if zeros is not None:
        return zeros
    layout = None if key is None else find_layout(func, args, kwargs)
    if layout is not None:
        _RESULTS[key] = layout
        return _make_empty(layout)
    result = func(*args, **kwargs)
    outputs = result if isinstance(result, tuple) else (result,)
    if key is not None and all(isinstance(output, torch.Tensor) and output.is_meta for output in outputs):
        layouts = tuple((output.shape, output.stride(), output.dtype) for output in outputs)
        _RESULTS[key] = layouts if isinstance(result, tuple) else layouts[0]
    return result


def _make_empty(layout: Any) -> Any:
    """Return an empty meta tensor with a layout, or a tuple of them."""
    if layout and isinstance(layout[0], tuple) and not isinstance(layout[0], torch.Size):
        return tuple(_make_empty(item) for item in layout)
    return torch.empty_strided(layout[0], layout[1], dtype=layout[2], device="meta")


def make_zeros(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros on the CPU, whose memory the operating system provides when it is read."""
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(numpy.zeros(size, dtype=numpy.uint8)).view(dtype).view(shape)


def _is_large(value: Any) -> bool:
    """Return whether a value is a CPU tensor that is large enough to be a model output, or a list of them."""
    if isinstance(value, list | tuple):
        return bool(value) and all(_is_large(item) for item in value)
    return isinstance(value, torch.Tensor) and not value.is_meta and value.numel() >= _IMAGE_ELEMENTS


def _skip(func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """Return zeros instead of the result of an operation on large CPU tensors; return None if it must run."""
    if func in _ON_META and any(_is_large(value) for value in args):
        return _return_zeros(func, args, kwargs)
    target = kwargs.get("device")
    if target is not None and not is_host(torch.device(target)):
        return None
    if func is _ATEN._to_copy.default and _is_large(args[0]):
        return make_zeros(args[0].shape, kwargs.get("dtype") or args[0].dtype)
    if func is _ATEN.randn.generator and math.prod(args[0]) >= _IMAGE_ELEMENTS:
        return make_zeros(torch.Size(args[0]), kwargs.get("dtype") or torch.get_default_dtype())
    return None


def _return_zeros(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Return zeros with the result's shape and dtype, without running the operation on the CPU."""
    layout = find_layout(func, args, kwargs)
    if layout is not None:
        return make_zeros(layout[0], layout[2])
    result = func(*(_to_meta(value) for value in args), **kwargs)
    return make_zeros(result.shape, result.dtype)


def _to_meta(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_to_meta(item) for item in value]
    return value.to("meta") if isinstance(value, torch.Tensor) and value.dim() else value


@functools.cache
def _aliases(func: Any) -> bool:
    """Return whether an operation returns a view or a list, or nothing, or modifies its arguments."""
    schema = read_schema(func)
    arguments, returns = schema.arguments, schema.returns
    tensors = all(str(value.type) == "Tensor" for value in returns) or len(returns) == 1
    return not returns or not tensors or any(value.alias_info is not None for value in (*arguments, *returns))


def read_key(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a cache key for an operation's argument layouts, or None if an argument is a CPU tensor."""
    key: list[Any] = [func]
    for value in (*args, *kwargs.items()):
        item = _read_key_item(value)
        if item is None:
            return None
        key.append(item)
    return tuple(key)


def _read_key_item(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype) if value.is_meta else None
    if isinstance(value, list | tuple):
        items = tuple(_read_key_item(item) for item in value)
        return None if any(item is None for item in items) else items
    return (type(value), value)  # 1, 1.0 and True are equal, but give different dtypes


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Return whether a batch of several images is in the channels_last memory format."""
    # Attention can leave a batch of one with these strides by chance; torch's kernels do not treat it as such.
    is_batch = tensor.dim() == 4 and tensor.shape[0] > 1
    return is_batch and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def _convolve(*args: Any) -> torch.Tensor:
    """Run a convolution on `meta` that preserves channels_last, unlike torch's own meta kernel."""
    result: torch.Tensor = _run_once(_ATEN.convolution.default, args, {})
    if not is_channels_last(args[0]):
        return result
    return torch.empty(result.shape, dtype=result.dtype, device="meta", memory_format=torch.channels_last)


def _return_one(tensor: torch.Tensor) -> Any:
    """Return True, 1.0 or 1, depending on the dtype, for `item()` on a meta tensor, which has no values."""
    return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1


def _copy(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
    """Copy a meta tensor; a copy to the CPU contains zeros, because a meta tensor has no values."""
    if torch.device(options.get("device") or "meta").type == "meta":
        return _run_once(_ATEN._to_copy.default, (tensor,), options)  # type: ignore[no-any-return]
    return make_zeros(tensor.shape, options.get("dtype") or tensor.dtype)


def _normalize(tensor: torch.Tensor, weight: Any, bias: Any, images: int, *sizes: Any) -> Any:
    """Return empty outputs for group norm; torch's meta kernel would run a dozen operations instead."""
    result = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return result, *(torch.empty(images, sizes[2], dtype=tensor.dtype, device="meta") for _ in range(2))


def _normalize_layers(tensor: torch.Tensor, sizes: list[int], *options: Any) -> Any:
    """Return empty outputs for layer norm."""
    result = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    outer = (*tensor.shape[: -len(sizes)], *(1 for _ in sizes))
    return result, *(torch.empty(outer, dtype=torch.float32, device="meta") for _ in range(2))


def _return_one_position(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(1, tensor.dim(), dtype=torch.int64, device=tensor.device)


_ATEN = torch.ops.aten
# A CPU tensor with at least this many elements is treated as a model output, which contains only zeros.
_IMAGE_ELEMENTS = 2**20
# Operations on such tensors that are not computed.
_ON_META = {
    _ATEN.add.Tensor,
    _ATEN.sub.Tensor,
    _ATEN.mul.Tensor,
    _ATEN.div.Tensor,
    _ATEN.clamp.default,
    _ATEN.stack.default,
    _ATEN.cat.default,
    _ATEN.clone.default,
}
# Operations that read values, or that meta kernels handle badly.
_SUBSTITUTES: dict[Any, Callable[..., Any]] = {
    _ATEN._local_scalar_dense.default: _return_one,
    _ATEN._to_copy.default: _copy,
    _ATEN.convolution.default: _convolve,
    _ATEN.native_group_norm.default: _normalize,
    _ATEN.native_layer_norm.default: _normalize_layers,
    _ATEN.nonzero.default: _return_one_position,
    _ATEN.equal.default: lambda left, right: True,
}
