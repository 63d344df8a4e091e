"""One operation on virtual tensors: unwrap, run it on the CPU, hold it against the limits, wrap again."""

from __future__ import annotations

import math
import threading
from typing import Any

import torch

from anyaccel.backends.claim import Limit
from anyaccel.backends.torch_device import is_host
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.generator import place_of
from anyaccel.emulator.limit_index import LimitIndex, OperationFacts, read_operation
from anyaccel.emulator.recurrent_cells import SUBSTITUTES
from anyaccel.emulator.tensor import VirtualTensor, active, wrap
from anyaccel.upstream.torch_internals import FakeTensor, can_decompose

__all__ = ["dispatch"]

_FACTS: dict[Any, OperationFacts] = {}
_HOST = torch.device("cpu")
_LENDING = threading.Lock()
# Operations that may take tensors of the host beside those of the device.
_MOVES = {"copy_", "_to_copy"}
_MAY_MIX = {*_MOVES, "index"}
_PUTS = {"index_put", "index_put_", "_index_put_impl_"}
"""Operations whose indices may lie on the host, and whose values may not."""
_ATTENTION = "scaled_dot_product_attention"
_SCORES = {"bmm", "baddbmm"}
_ARITHMETIC = {"add", "add_", "div", "div_", "mul", "mul_", "sub", "sub_"}
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class _Call:
    """The arguments of one operation without their wrappers, and what was learned on the way."""

    def __init__(self, name: str, first_is_ours: bool) -> None:
        self.name = name
        self.first_is_ours = first_is_ours
        self.values: Any = None
        self.device: torch.device | None = None
        self.wrappers: dict[int, VirtualTensor] = {}
        self.host_tensors: list[torch.Tensor] = []

    def unwrap(self, value: Any) -> Any:
        if isinstance(value, VirtualTensor):
            inner = value._inner
            if self.device is None:
                self.device = value.device
            elif self.device != value.device and self.name not in _MOVES:
                raise _mixed(self.device, value.device, self.name)
            self.wrappers[id(inner)] = value
            return inner
        if isinstance(value, torch.Tensor):
            if isinstance(value, FakeTensor) and value.device.type == active().name:
                return self._take_traced(value)
            self.host_tensors.append(value)
            return value
        if isinstance(value, list | tuple):
            return type(value)([self.unwrap(item) for item in value])
        return value

    def _take_traced(self, value: FakeTensor) -> torch.Tensor:
        """A tensor that a factory made while a graph is traced is a plain fake one on the device: one on the host."""
        self.device = self.device or value.device
        with value.fake_mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_HOST)


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one operation that has a virtual tensor, or the virtual device, among its arguments."""
    accelerator = active()
    facts = _FACTS.get(func)
    if facts is None:
        facts = _FACTS[func] = read_operation(func)
    if torch.is_inference_mode_enabled() and facts.name != _ATTENTION and can_decompose(func):
        # In inference mode an operation that is made of others arrives whole: `to` with a device by position, for one.
        return func.decompose(*args, **kwargs)
    call = _Call(facts.name, bool(args) and isinstance(args[0], VirtualTensor))
    call.values = args[2] if facts.name in _PUTS else None
    plain_args = [call.unwrap(value) for value in args]
    plain_kwargs = {name: call.unwrap(value) for name, value in kwargs.items()}
    target = _choose_target(accelerator, call, kwargs)
    _refuse_mixture(call, facts)
    if "device" in plain_kwargs:
        plain_kwargs["device"] = _HOST
    draws = facts.is_random and not is_host(target)
    if draws and facts.takes_generator:
        _use_own_generator(accelerator, func, plain_kwargs, target)
    traced = any(isinstance(inner, FakeTensor) for inner in plain_args)
    if facts.name == _ATTENTION and accelerator.enforcing and not traced and not is_host(target):
        _enforce_on_scores(accelerator, facts, plain_args)
        _hold_scores(accelerator, plain_args, target)
    if draws and not facts.takes_generator:
        result = _draw_apart(accelerator, func, plain_args, plain_kwargs, target)
    else:
        result = SUBSTITUTES.get(facts.name, func)(*plain_args, **plain_kwargs)
    if accelerator.enforcing and not traced and not _is_fake(result):
        result = _enforce(accelerator, facts, plain_args, plain_kwargs, result, target, call)
    return _wrap_result(result, target, call, facts)


def _choose_target(accelerator: VirtualAccelerator, call: _Call, kwargs: dict[str, Any]) -> torch.device:
    """Where the result lies: where `device=` says, else where the arguments are."""
    asked: torch.device | None = kwargs.get("device")
    if asked is not None:
        if asked.type == accelerator.name:
            return accelerator.device(None if asked.index is None else accelerator.check_index(asked.index))
        return asked
    return call.device or accelerator.device()


def _refuse_mixture(call: _Call, facts: OperationFacts) -> None:
    """A tensor of the host in an operation of the device is an error on every device; a number is not."""
    if call.device is None:
        return
    if facts.name == "index" and not call.first_is_ours:
        raise _mixed(_HOST, call.device, facts.name)
    if facts.name in _MAY_MIX:
        return
    if facts.name in _PUTS:
        call.host_tensors = [tensor for tensor in call.host_tensors if tensor is call.values]
    for tensor in call.host_tensors:
        if tensor.dim() > 0 and is_host(tensor.device):
            raise _mixed(call.device, tensor.device, facts.name)


def _mixed(first: torch.device, second: torch.device, name: str) -> RuntimeError:
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}! "
        f"(when checking the arguments of {name})"
    )


def _use_own_generator(
    accelerator: VirtualAccelerator, func: Any, kwargs: dict[str, Any], target: torch.device
) -> None:
    """A draw on the device comes from the device's generator, and leaves the host's alone."""
    given = kwargs.get("generator")
    if given is None:
        kwargs["generator"] = accelerator.generators[target.index or 0]
    elif place_of(given).type != target.type:
        raise RuntimeError(
            f"Expected a '{target.type}' device type for generator but found '{place_of(given).type}' (in {func})"
        )


def _draw_apart(accelerator: VirtualAccelerator, func: Any, args: Any, kwargs: Any, target: torch.device) -> Any:
    """An operation that takes no generator draws from the host's: lend it the device's state, and put it back."""
    own, host = accelerator.generators[target.index or 0], torch.default_generator
    with _LENDING:
        kept = host.get_state()
        host.set_state(own.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            own.set_state(host.get_state())
            host.set_state(kept)


def _enforce(
    accelerator: VirtualAccelerator,
    facts: OperationFacts,
    args: list[Any],
    kwargs: dict[str, Any],
    result: Any,
    target: torch.device,
    call: _Call,
) -> Any:
    """Hold one operation against the sheet; gives the result as the device would, NaN and narrowing included."""
    if facts.reads_on_host or _goes_to_host(facts, call, target, args):
        accelerator.read_on_host(facts.label)
    if is_host(target):
        return result
    _enforce_on_call(accelerator, facts, args, result, call)
    if facts.name in accelerator.limits.operations:
        result = _read_ignored_input(accelerator, facts, args, kwargs, result)
    if not facts.is_view:
        for tensor in _tensors(result):
            if not facts.mutates:  # what is written in place was held against the limits when it was made
                _enforce_on_result(accelerator, facts, tensor)
            _narrow(accelerator.limits, tensor)
    return result


def _enforce_on_call(
    accelerator: VirtualAccelerator, facts: OperationFacts, args: list[Any], result: Any, call: _Call
) -> None:
    limits = accelerator.limits
    if facts.is_random and limits.random is not None:
        accelerator.meet("random_numbers", limits.random, facts.label)
    if limits.shapes is not None and (facts.has_data_dependent_shape or _indexes_by_mask(facts, args)):
        accelerator.meet("data_dependent_shapes", limits.shapes, facts.label)
    if limits.host_number is not None and facts.name in _ARITHMETIC and _has_offset_number(call):
        accelerator.meet(*limits.host_number, facts.label)
    if facts.name in limits.operations or facts.overload in limits.operations:
        for name, limit in limits.met_by_operation(facts, args, result):
            accelerator.meet(name, limit, facts.label)


def _has_offset_number(call: _Call) -> bool:
    """Whether a number of the host, such as sigmas[3], lies inside a larger tensor."""
    return any(tensor.dim() == 0 and tensor.storage_offset() for tensor in call.host_tensors)


def _enforce_on_result(accelerator: VirtualAccelerator, facts: OperationFacts, tensor: torch.Tensor) -> None:
    limits = accelerator.limits
    met = limits.dtypes.get(tensor.dtype)
    if met is not None:
        name, limit = met
        accelerator.meet(name, limit, facts.label)
    if limits.tensor_sizes or limits.score_sizes:
        for name, size in limits.met_by_size(tensor.numel(), tensor.element_size(), facts.name in _SCORES):
            accelerator.meet(name, size, facts.label)
    if limits.nan_in_empty and facts.name in _EMPTY and tensor.is_floating_point() and tensor.itemsize > 1:
        tensor.fill_(float("nan"))


def _narrow(limits: LimitIndex, tensor: torch.Tensor) -> None:
    """A type that the device keeps as a smaller one loses its digits, while torch still sees the larger."""
    met = limits.dtypes.get(tensor.dtype)
    if met is not None and met[1].effect == "narrowed" and met[1].becomes and not met[1].contradicted_by:
        tensor.copy_(tensor.to(getattr(torch, met[1].becomes)))


def _enforce_on_scores(accelerator: VirtualAccelerator, facts: OperationFacts, args: list[Any]) -> None:
    """The scores that attention would hold, by the shapes of query and key alone: they are never made here."""
    query, key = args[0], args[1]
    elements = math.prod(query.shape[:-1]) * key.shape[-2]
    for name, limit in accelerator.limits.met_by_size(elements, query.element_size(), scores=True):
        accelerator.meet(name, limit, facts.label)


def _hold_scores(accelerator: VirtualAccelerator, args: list[Any], target: torch.device) -> None:
    """Where attention is known to hold all its scores, in float32 and twice, there must be room for them."""
    if isinstance(accelerator.sheet.fused_attention, Limit):
        query, key = args[0], args[1]
        accelerator.book.pass_by(2 * 4 * math.prod(query.shape[:-1]) * key.shape[-2], target.index or 0)


def _read_ignored_input(
    accelerator: VirtualAccelerator, facts: OperationFacts, args: list[Any], kwargs: dict[str, Any], result: Any
) -> Any:
    """Where the device reads an argument that a factor of 0 should silence, its NaN goes into the result."""
    for name, limit in accelerator.limits.operations.get(facts.name, ()):
        if limit.reads_ignored_input and kwargs.get("beta", 1) == 0 and not torch.isfinite(args[0]).all():
            accelerator.meet(name, limit, facts.label)
            result = result + args[0] * 0
    return result


def _goes_to_host(facts: OperationFacts, call: _Call, target: torch.device, args: list[Any]) -> bool:
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
                return _keep_shape(written)
            if is_host(target) or any(result is host for host in call.host_tensors):
                return result
        if target.type == "meta":  # shapes alone are nobody's memory
            return result.to(target)
        return result if is_host(target) else wrap(result, target)
    if isinstance(result, list | tuple):
        return type(result)([_wrap_result(item, target, call, facts) for item in result])
    if facts.mutates and result is None:
        for written in call.wrappers.values():
            _keep_shape(written)
    return result


def _keep_shape(written: VirtualTensor) -> VirtualTensor:
    """After an operation in place: the wrapper takes on the shape that the data inside has now."""
    inner = written._inner
    moved = written.stride() != inner.stride() or written.storage_offset() != inner.storage_offset()
    if written.shape != inner.shape or moved:
        active().book.add(inner, written.device.index or 0)
        with torch.no_grad():
            written.data = VirtualTensor(inner, written.device)
    return written


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, list | tuple):
        return [item for item in result if isinstance(item, torch.Tensor)]
    return []


def _is_fake(result: Any) -> bool:
    return any(isinstance(tensor, FakeTensor) for tensor in _tensors(result))
