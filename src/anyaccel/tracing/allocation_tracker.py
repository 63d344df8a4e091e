"""Tracker for the memory in use while a pipeline runs on the `meta` device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from anyaccel.planning.attention import UNCHANGED_ATTENTION, AttentionRule
from anyaccel.planning.footprint import Work
from anyaccel.planning.kernel_workspace import Workspace
from anyaccel.planning.limit_hits import TraceFacts
from anyaccel.tracing.meta_operations import is_channels_last, run_operation
from anyaccel.tracing.work_count import count_work
from anyaccel.upstream.torch_internals import TorchDispatchMode, read_address

__all__ = ["AllocationTracker"]


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
        self.work = Work()
        """Work of the operations on `meta` tensors."""
        self.model = ""
        """Name of the model that is running."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count allocations inside the `with` block."""
        with self._attention, self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = run_operation(func, args, kwargs)
        if self._paused:
            return result
        self.work += count_work(func, args, kwargs, result)
        for output in result if isinstance(result, list | tuple) else (result,):
            if isinstance(output, torch.Tensor):
                self.add(output)
                if output.is_meta:
                    self._record_facts(func, output)
        # Tensor.item() returns no tensor: record its input.
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            self._record_facts(func, args[0])
        if func is torch.ops.aten.convolution.default:
            images, weight, output = (tuple(tensor.shape) for tensor in (args[0], args[1], result))
            last = is_channels_last(args[0])
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
        self.tracker.work += Work(flops=2.0 * scores * (query.shape[-1] + value.shape[-1]), kernels=1)
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
