"""Tracker for the memory in use while a pipeline runs on the `meta` device."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from anyaccel.planning.attention import UNCHANGED_ATTENTION, AttentionRule
from anyaccel.planning.kernel_workspace import Workspace
from anyaccel.planning.limit_hits import TraceFacts
from anyaccel.tracing.meta_layouts import Layout, find_layout
from anyaccel.upstream.torch_internals import TorchDispatchMode, read_address, read_schema

__all__ = ["AllocationTracker", "make_zeros"]


class AllocationTracker(TorchDispatchMode):
    """Dispatch mode that tracks the current and peak bytes of live tensor storages, excluding weights."""

    def __init__(
        self, workspace: Workspace, weights: Iterable[torch.Tensor], attention: AttentionRule = UNCHANGED_ATTENTION
    ) -> None:
        super().__init__()
        self.used = self.peak = 0
        self.workspace = workspace
        self._weights = {read_address(tensor.untyped_storage()) for tensor in weights}
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._attention = _AttentionMode(self, attention)
        self._paused = False
        self.trace_facts = TraceFacts()
        self.flops = 0.0
        """Floating-point operations of matrix products, convolutions and attention on `meta` tensors."""
        self.model = ""
        """Name of the model that is running."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count allocations inside the `with` block."""
        with self._attention, self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        substitute = _SUBSTITUTES.get(func)
        replaced = substitute is not None and args[0].is_meta
        result = substitute(*args, **kwargs) if substitute and replaced else _run_once(func, args, kwargs)
        if self._paused:
            return result
        count_flops = flop_registry.get(func.overloadpacket)
        if count_flops is not None and isinstance(result, torch.Tensor) and result.is_meta:
            self.flops += _count_flops(func, count_flops, args, kwargs, result)
        for output in result if isinstance(result, list | tuple) else (result,):
            if isinstance(output, torch.Tensor):
                self.add(output)
                if output.is_meta:
                    self._record_facts(func, output)
        # Tensor.item() returns no tensor: record its input.
        if func is _ATEN._local_scalar_dense.default and args[0].is_meta:
            self._record_facts(func, args[0])
        if func is torch.ops.aten.convolution.default:
            images, weight, output = (tuple(tensor.shape) for tensor in (args[0], args[1], result))
            last = _is_channels_last(args[0])
            self.count_transient(self.workspace.convolution_bytes(images, weight, output, result.element_size(), last))
        return result

    def _record_facts(self, func: Any, tensor: torch.Tensor) -> None:
        """Record a tensor's dtype, size and operation for the comparison with device limits."""
        facts, dtype, elements = self.trace_facts, str(tensor.dtype)[6:], tensor.numel()
        facts.dtypes.add(dtype)
        facts.most_elements = max(facts.most_elements, elements)
        facts.most_bytes = max(facts.most_bytes, elements * tensor.element_size())
        sizes = facts.operations.setdefault(func.overloadpacket.__name__, {})
        sizes[dtype] = max(sizes.get(dtype, 0), elements)

    def count_transient(self, size: int) -> None:
        """Update the peak for `size` bytes that an operation allocates and frees before it returns."""
        self.peak = max(self.peak, self.used + size)

    def add(self, tensor: torch.Tensor, *, replaces_another: bool = False) -> None:
        """Count a tensor's storage, unless it is a weight or is already counted.

        With `replaces_another=True`, the peak does not change, because the tensor replaces one that is
        already counted.
        """
        storage = tensor.untyped_storage()
        key = read_address(storage)
        if key in self._weights:
            return
        entry = self._alive.get(key)
        # The address of a dead storage can be reused.
        if entry is not None and entry[0]() is not None:
            return
        size = self.workspace.round_up_bytes(storage.nbytes())
        self._alive[key] = (weakref.ref(storage, lambda _: self._drop(key)), size)
        self.used += size
        if not replaces_another:
            self.peak = max(self.peak, self.used)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count allocations inside the `with` block."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def ignore(self, tensor: torch.Tensor) -> None:
        """Exclude a tensor from the count, because it represents a tensor that is already counted."""
        storage = tensor.untyped_storage()
        key = read_address(storage)
        self._alive[key] = (weakref.ref(storage, lambda _: self._drop(key)), 0)

    def measure_peak(self, run: Callable[[], Any]) -> tuple[Any, int]:
        """Call `run`; return its result and its peak bytes above the memory in use before the call."""
        before, self.peak = self.peak, self.used
        start = self.used
        result = run()
        above = self.peak - start
        self.peak = max(before, self.peak)
        return result, above

    def take_peak(self) -> int:
        """Return the peak memory in bytes since the last call, and reset it to the current memory use."""
        peak, self.peak = self.peak, self.used
        return peak

    def _drop(self, key: int) -> None:
        entry = self._alive.pop(key, None)
        if entry is not None:
            self.used -= entry[1]


class _AttentionMode(TorchFunctionMode):
    """Function mode that counts scaled dot-product attention as one kernel, as on a real device.

    On `meta`, torch would decompose it into several operations.
    """

    def __init__(self, tracker: AllocationTracker, rule: AttentionRule) -> None:
        super().__init__()
        self.tracker, self.rule = tracker, rule

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        named = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | (kwargs or {})
        query, key, value, mask = named["query"], named["key"], named["value"], named.get("attn_mask")
        if not query.is_meta:
            return func(*args, **(kwargs or {}))
        # The copies count: they are allocated on the device as well.
        if self.rule.contiguous:
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        # Kernels read a mask without a copy only if its last dimension is dense.
        plain = mask is None or mask.stride(-1) == 1 or mask.shape[-1] == 1
        workspace = self.tracker.workspace
        shapes = tuple(query.shape), tuple(key.shape), value.shape[-1]
        scores = query.numel() // query.shape[-1] * key.shape[-2]
        # Two products: of queries and keys, and of scores and values.
        self.tracker.flops += 2.0 * scores * (query.shape[-1] + value.shape[-1])
        facts, model = self.tracker.trace_facts, self.tracker.model
        facts.max_scores = max(facts.max_scores, scores)
        facts.score_bytes = max(facts.score_bytes, scores * query.element_size())
        facts.sequences[model] = max(facts.sequences.get(model, 0), query.shape[-2])
        sliced = self.rule.slices(shapes[0], key.shape[-2])
        if sliced is None:
            output = torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype, device=query.device)
            self.tracker.count_transient(workspace.attention_bytes(*shapes, plain_mask=plain))
            return output
        # Allocate what sliced attention allocates: flattened inputs, the slices of the result, and the result.
        flat = [tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (query, key, value)]
        slices = torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype, device=query.device)
        masks = 0 if mask is None and not named.get("is_causal") else 2 * sliced[0][0] * sliced[0][1] * sliced[1][1]
        self.tracker.count_transient(workspace.attention_bytes(*sliced, plain_mask=plain) + masks)
        output = torch.empty_like(slices)
        del flat, slices
        return output


# Floating-point operations by operation and argument shapes: counting them takes longer than the lookup.
_FLOPS: dict[Any, float] = {}


def _count_flops(func: Any, count: Callable[..., float], args: Any, kwargs: Any, result: torch.Tensor) -> float:
    """Return the floating-point operations of an operation."""
    key = _read_key(func, args, kwargs)
    if key not in _FLOPS:
        _FLOPS[key] = count(*args, **kwargs, out_val=result)
    return _FLOPS[key]


# Result shapes by operation and argument shapes: models repeat their blocks, and meta kernels are slow.
_RESULTS: dict[Any, Layout | tuple[Layout, ...]] = {}


def _run_once(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation, or return an empty meta tensor if the result's layout is already cached."""
    key = None if _aliases(func) else _read_key(func, args, kwargs)
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
    if torch.device(kwargs.get("device") or "cpu").type != "cpu":
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


def _read_key(func: Any, args: Any, kwargs: Any) -> Any:
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


def _is_channels_last(tensor: torch.Tensor) -> bool:
    """Return whether a batch of several images is in the channels_last memory format."""
    # Attention can leave a batch of one with these strides by chance; torch's kernels do not treat it as such.
    is_batch = tensor.dim() == 4 and tensor.shape[0] > 1
    return is_batch and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def _convolve(*args: Any) -> torch.Tensor:
    """Run a convolution on `meta` that preserves channels_last, unlike torch's own meta kernel."""
    result: torch.Tensor = _run_once(_ATEN.convolution.default, args, {})
    if not _is_channels_last(args[0]):
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
