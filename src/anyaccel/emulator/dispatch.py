"""Dispatch of operations on virtual tensors: unwrap, run on the CPU, check the limits and wrap."""

from __future__ import annotations

import math
import threading
from typing import Any

import torch

from anyaccel.backends.claim import Limit
from anyaccel.backends.device_type_checks import is_host
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.generator import find_generator_device
from anyaccel.emulator.limit_index import LimitIndex, OperationFacts, read_operation
from anyaccel.emulator.substitutes import SUBSTITUTES
from anyaccel.emulator.tensor import VirtualTensor, active, wrap
from anyaccel.upstream.torch_internals import FakeTensor, can_decompose

__all__ = ["dispatch"]

_FACTS: dict[Any, OperationFacts] = {}
_CPU = torch.device("cpu")
_CPU_GENERATOR_LOCK = threading.Lock()
_MOVES = {"copy_", "_to_copy"}
# Operations that accept CPU tensors next to device tensors.
_MAY_MIX = {*_MOVES, "index"}
# Operations that accept indices on the CPU, but not values.
_INDEX_PUT = {"index_put", "index_put_", "_index_put_impl_"}
_ATTENTION = "scaled_dot_product_attention"
# On CUDA, these do not accept zero-dimensional CPU tensors (seen with torch 2.11).
_JOIN = ("cat", "stack")
_SCORE_OPERATIONS = {"bmm", "baddbmm"}
_ARITHMETIC = {"add", "add_", "div", "div_", "mul", "mul_", "sub", "sub_"}
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class _Call:
    """State of one dispatched operation: its device, its virtual tensor arguments and its CPU tensors."""

    def __init__(self, name: str, first_is_virtual: bool) -> None:
        self.name = name
        self.first_is_virtual = first_is_virtual
        self.values: Any = None
        self.device: torch.device | None = None
        self.wrappers: dict[int, VirtualTensor] = {}
        self.cpu_tensors: list[torch.Tensor] = []

    def unwrap(self, value: Any) -> Any:
        if isinstance(value, VirtualTensor):
            inner = value._inner
            if self.device is None:
                self.device = value.device
            elif self.device != value.device and self.name not in _MOVES:
                raise _make_device_error(self.device, value.device, self.name)
            self.wrappers[id(inner)] = value
            return inner
        if isinstance(value, torch.Tensor):
            if isinstance(value, FakeTensor) and value.device.type == active().name:
                return self._to_cpu_fake(value)
            self.cpu_tensors.append(value)
            return value
        if isinstance(value, list | tuple):
            return type(value)([self.unwrap(item) for item in value])
        return value

    def _to_cpu_fake(self, value: FakeTensor) -> torch.Tensor:
        """Return a fake CPU tensor for a fake device tensor, which factories create while tracing a graph."""
        self.device = self.device or value.device
        with value.fake_mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_CPU)


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation that has a virtual tensor or the virtual device among its arguments."""
    accelerator = active()
    facts = _FACTS.get(func)
    if facts is None:
        facts = _FACTS[func] = read_operation(func)
    if torch.is_inference_mode_enabled() and facts.name != _ATTENTION and can_decompose(func):
        # Autograd decomposes composite operations, but inference mode skips it: `to` with a positional device, for
        # example, arrives undecomposed and has no `device` keyword.
        return func.decompose(*args, **kwargs)
    call = _Call(facts.name, bool(args) and isinstance(args[0], VirtualTensor))
    call.values = args[2] if facts.name in _INDEX_PUT else None
    plain_args = [call.unwrap(value) for value in args]
    plain_kwargs = {name: call.unwrap(value) for name, value in kwargs.items()}
    # The original kwargs: in plain_kwargs the device becomes the CPU, where the operation runs.
    target = _choose_target(accelerator, call, kwargs)
    _check_devices(call, facts)
    if "device" in plain_kwargs:
        plain_kwargs["device"] = _CPU
    draws = facts.is_random and not is_host(target)
    if draws and facts.takes_generator:
        _use_own_generator(accelerator, func, plain_kwargs, target)
    traced = any(isinstance(inner, FakeTensor) for inner in plain_args)
    if facts.name == _ATTENTION and accelerator.enforcing and not traced and not is_host(target):
        # Before the call: with too little memory, the operation must fail and not run.
        _enforce_on_scores(accelerator, facts, plain_args)
        _count_scores(accelerator, plain_args, target)
    if draws and not facts.takes_generator:
        result = _draw_with_device_state(accelerator, func, plain_args, plain_kwargs, target)
    else:
        result = SUBSTITUTES.get(facts.name, func)(*plain_args, **plain_kwargs)
    if accelerator.enforcing and not traced and not _is_fake(result):
        result = _enforce(accelerator, facts, plain_args, plain_kwargs, result, target, call)
    return _wrap_result(result, target, call, facts)


def _choose_target(accelerator: VirtualAccelerator, call: _Call, kwargs: dict[str, Any]) -> torch.device:
    """Return the result's device: the `device` argument, the tensor arguments' device, or the current one."""
    requested: torch.device | None = kwargs.get("device")
    if requested is not None:
        if requested.type == accelerator.name:
            return accelerator.device(None if requested.index is None else accelerator.check_index(requested.index))
        return requested
    return call.device or accelerator.device()


def _check_devices(call: _Call, facts: OperationFacts) -> None:
    """Raise torch's error if an operation mixes device tensors with CPU tensors.

    Zero-dimensional CPU tensors are allowed, except in lists of tensors, as are CPU tensors used as indices.
    """
    if call.device is None:
        return
    # A CPU tensor cannot be indexed by device tensors; the reverse works.
    if facts.name == "index" and not call.first_is_virtual:
        raise _make_device_error(_CPU, call.device, facts.name)
    if facts.name in _MAY_MIX:
        return
    if facts.name in _INDEX_PUT:
        call.cpu_tensors = [tensor for tensor in call.cpu_tensors if tensor is call.values]
    for tensor in call.cpu_tensors:
        if (tensor.dim() > 0 or facts.name in _JOIN) and is_host(tensor.device):
            raise _make_device_error(call.device, tensor.device, facts.name)


def _make_device_error(first: torch.device, second: torch.device, name: str) -> RuntimeError:
    # torch's own text: programs search for it.
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}! "
        f"(when checking the arguments of {name})"
    )


def _use_own_generator(
    accelerator: VirtualAccelerator, func: Any, kwargs: dict[str, Any], target: torch.device
) -> None:
    """Set the `generator` argument to the device's own generator if it is missing.

    Raises RuntimeError, as torch does, for a generator on a different device type.
    """
    generator = kwargs.get("generator")
    if generator is None:
        kwargs["generator"] = accelerator.generators[target.index or 0]
    elif find_generator_device(generator).type != target.type:
        generator_type = find_generator_device(generator).type
        raise RuntimeError(
            f"Expected a '{target.type}' device type for generator but found '{generator_type}' (in {func})"
        )


def _draw_with_device_state(
    accelerator: VirtualAccelerator, func: Any, args: Any, kwargs: Any, target: torch.device
) -> Any:
    """Run a random operation without a generator argument, such as dropout, with the device's RNG state.

    The CPU's default generator is set to the device's state for the call, and its own state is restored
    afterward.
    """
    device_generator, cpu_generator = accelerator.generators[target.index or 0], torch.default_generator
    with _CPU_GENERATOR_LOCK:
        saved_state = cpu_generator.get_state()
        cpu_generator.set_state(device_generator.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            device_generator.set_state(cpu_generator.get_state())
            cpu_generator.set_state(saved_state)


def _enforce(
    accelerator: VirtualAccelerator,
    facts: OperationFacts,
    args: list[Any],
    kwargs: dict[str, Any],
    result: Any,
    target: torch.device,
    call: _Call,
) -> Any:
    """Check an operation against the sheet, and return the result that the real device would compute.

    The result may contain NaN, or values rounded to a narrower dtype.
    """
    if facts.reads_to_host or _copies_to_cpu(facts, call, target, args):
        accelerator.record_host_read(facts.label)
    if is_host(target):
        return result
    _enforce_on_call(accelerator, facts, args, result, call)
    if facts.name in accelerator.limits.operations:
        result = _read_ignored_input(accelerator, facts, args, kwargs, result)
    if not facts.is_view:
        for tensor in _list_tensors(result):
            if not facts.mutates:  # an in-place result was checked when it was created
                _enforce_on_result(accelerator, facts, tensor)
            _narrow(accelerator.limits, tensor)
    return result


def _enforce_on_call(
    accelerator: VirtualAccelerator, facts: OperationFacts, args: list[Any], result: Any, call: _Call
) -> None:
    limits = accelerator.limits
    if facts.is_random and limits.random is not None:
        accelerator.hit_limit("random_numbers", limits.random, facts.label)
    if limits.shapes is not None and (facts.has_data_dependent_shape or _indexes_by_mask(facts, args)):
        accelerator.hit_limit("data_dependent_shapes", limits.shapes, facts.label)
    if limits.host_scalar is not None and facts.name in _ARITHMETIC and _has_offset_scalar(call):
        accelerator.hit_limit(*limits.host_scalar, facts.label)
    if facts.name in limits.operations or facts.overload in limits.operations:
        for name, limit in limits.match_operation(facts, args, result):
            accelerator.hit_limit(name, limit, facts.label)


def _has_offset_scalar(call: _Call) -> bool:
    """Return whether an argument is a zero-dimensional CPU view of a larger tensor, such as `sigmas[3]`."""
    return any(tensor.dim() == 0 and tensor.storage_offset() for tensor in call.cpu_tensors)


def _enforce_on_result(accelerator: VirtualAccelerator, facts: OperationFacts, tensor: torch.Tensor) -> None:
    limits = accelerator.limits
    dtype_limit = limits.dtypes.get(tensor.dtype)
    if dtype_limit is not None:
        name, limit = dtype_limit
        accelerator.hit_limit(name, limit, facts.label)
    if limits.tensor_sizes or limits.score_sizes:
        for name, size in limits.match_size(tensor.numel(), tensor.element_size(), facts.name in _SCORE_OPERATIONS):
            accelerator.hit_limit(name, size, facts.label)
    # NaN is the worst content that uninitialized memory can have. One-byte dtypes (float8) are skipped.
    if limits.nan_in_empty and facts.name in _EMPTY and tensor.is_floating_point() and tensor.itemsize > 1:
        tensor.fill_(float("nan"))


def _narrow(limits: LimitIndex, tensor: torch.Tensor) -> None:
    """Round values to the narrower dtype that the device stores; `tensor.dtype` does not change."""
    entry = limits.dtypes.get(tensor.dtype)
    if entry is not None and entry[1].effect == "narrowed" and entry[1].becomes and not entry[1].contradicted_by:
        tensor.copy_(tensor.to(getattr(torch, entry[1].becomes)))


def _enforce_on_scores(accelerator: VirtualAccelerator, facts: OperationFacts, args: list[Any]) -> None:
    """Check the size of the attention scores against the limits.

    The size is computed from the shapes, because the CPU kernel does not materialize the scores.
    """
    query, key = args[0], args[1]
    elements = math.prod(query.shape[:-1]) * key.shape[-2]
    for name, limit in accelerator.limits.match_size(elements, query.element_size(), scores=True):
        accelerator.hit_limit(name, limit, facts.label)


def _count_scores(accelerator: VirtualAccelerator, args: list[Any], target: torch.device) -> None:
    """Count the memory for two float32 copies of the attention scores if there is no fused attention."""
    if isinstance(accelerator.sheet.fused_attention, Limit):
        query, key = args[0], args[1]
        accelerator.memory.count_transient(2 * 4 * math.prod(query.shape[:-1]) * key.shape[-2], target.index or 0)


def _read_ignored_input(
    accelerator: VirtualAccelerator, facts: OperationFacts, args: list[Any], kwargs: dict[str, Any], result: Any
) -> Any:
    """Propagate NaN from an input that `beta=0` should ignore, on devices that read the input anyway."""
    for name, limit in accelerator.limits.operations.get(facts.name, ()):
        if limit.reads_ignored_input and kwargs.get("beta", 1) == 0 and not torch.isfinite(args[0]).all():
            accelerator.hit_limit(name, limit, facts.label)
            result = result + args[0] * 0
    return result


def _copies_to_cpu(facts: OperationFacts, call: _Call, target: torch.device, args: list[Any]) -> bool:
    if facts.name == "_to_copy":
        return is_host(target) and call.device is not None
    return facts.name == "copy_" and id(args[0]) not in call.wrappers and call.device is not None


def _indexes_by_mask(facts: OperationFacts, args: list[Any]) -> bool:
    if facts.name != "index":
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _wrap_result(result: Any, target: torch.device, call: _Call, facts: OperationFacts) -> Any:
    if isinstance(result, torch.Tensor):
        if facts.mutates:
            written = call.wrappers.get(id(result))
            if written is not None:
                return _sync_shape(written)
            if is_host(target) or any(result is tensor for tensor in call.cpu_tensors):
                return result
        if target.type == "meta":  # meta tensors use no device memory
            return result.to(target)
        return result if is_host(target) else wrap(result, target)
    if isinstance(result, list | tuple):
        return type(result)([_wrap_result(item, target, call, facts) for item in result])
    if facts.mutates and result is None:
        for written in call.wrappers.values():
            _sync_shape(written)
    return result


def _sync_shape(written: VirtualTensor) -> VirtualTensor:
    """Update a virtual tensor's shape after an in-place operation, such as `resize_`, on its CPU tensor."""
    inner = written._inner
    layout_changed = written.stride() != inner.stride() or written.storage_offset() != inner.storage_offset()
    if written.shape != inner.shape or layout_changed:
        active().memory.add(inner, written.device.index or 0)
        with torch.no_grad():
            written.data = VirtualTensor(inner, written.device)
    return written


def _list_tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, list | tuple):
        return [item for item in result if isinstance(item, torch.Tensor)]
    return []


def _is_fake(result: Any) -> bool:
    return any(isinstance(tensor, FakeTensor) for tensor in _list_tensors(result))
