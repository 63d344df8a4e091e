"""Work of operations on `meta` tensors, for the estimate of the time."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from anyaccel.planning.footprint import Work
from anyaccel.tracing.meta_operations import read_key
from anyaccel.upstream.torch_internals import read_schema

__all__ = ["count_work"]

_NO_WORK = Work()
# Floating-point operations by operation and argument shapes: counting them takes longer than the lookup.
_FLOPS: dict[Any, float] = {}


def count_work(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    """Return the work of an operation on `meta` tensors; other operations have none."""
    outputs = [value for value in (result if isinstance(result, list | tuple) else (result,)) if _is_meta(value)]
    if not outputs or not _runs_kernel(func):
        return _NO_WORK
    count_flops = flop_registry.get(func.overloadpacket)
    if count_flops is None:
        inputs = (value for item in args for value in (item if isinstance(item, list | tuple) else (item,)))
        tensors = [*outputs, *(value for value in inputs if _is_meta(value))]
        return Work(traffic_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors), kernels=1)
    key = read_key(func, args, kwargs)
    flops = None if key is None else _FLOPS.get(key)
    if flops is None:
        flops = float(count_flops(*args, **kwargs, out_val=result))
        if key is not None:
            _FLOPS[key] = flops
    return Work(flops=flops, kernels=1)


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


@functools.cache
def _runs_kernel(func: Any) -> bool:
    """Return whether an operation runs a kernel; views and new tensors without values do not."""
    schema = read_schema(func)
    is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns)
    return not is_view and "empty" not in func.overloadpacket.__name__
