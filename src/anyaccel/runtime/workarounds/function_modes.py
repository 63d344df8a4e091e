"""Torch function modes that apply the workarounds of a plan while a pipeline runs.

Two subclasses of `TorchFunctionMode` are used during a call. `PipelineFunctionMode` is active in the
pipeline's own code: it draws noise on the CPU and moves CPU tensors that are used together with device
tensors. `ModelFunctionMode` replaces it inside a model, but only if the plan names a workaround that
models need. Otherwise, a model runs without a mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

from anyaccel.backends.device_type_checks import is_host
from anyaccel.planning.plan import Plan
from anyaccel.runtime.workarounds import (
    complex_factories,
    dtypes,
    dynamic_shapes,
    noise,
    sliced_attention,
    uninitialized_memory,
)
from anyaccel.runtime.workarounds.host_transfer import CopyFunction, HostTransfer
from anyaccel.runtime.workarounds.known_values import KnownValues
from anyaccel.runtime.workarounds.out_argument import supporting_out
from anyaccel.runtime.workarounds.scheduler_tensors_on_cpu import CpuTensors
from anyaccel.runtime.workarounds.side_stream_copy import SideStreamCopy
from anyaccel.upstream.torch_internals import (
    HAS_COMPATIBLE_TYPE,
    DeviceContext,
    count_dispatch_modes,
    count_function_modes,
    find_replaced_function,
    is_own_function,
    pop_function_mode,
    push_function_mode,
    read_function_modes,
)
from anyaccel.upstream.torch_random import RANDOM_FUNCTIONS

__all__ = [
    "ModelFunctionMode",
    "PipelineFunctionMode",
    "enter_model_mode",
    "exit_model_mode",
    "find_unpatched",
    "has_foreign_modes",
    "make_host_transfer",
    "make_model_function_mode",
    "make_pipeline_function_mode",
    "preserve_function_modes",
]

# Runs instead of a torch function: gets the function and its arguments.
Handler: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

# Their indices must be on the CPU.
_SPLITS = (torch.tensor_split, torch.Tensor.tensor_split)
# Functions that accept CPU and device tensors together, or take only one tensor.
_MIXED_DEVICE_FUNCTIONS = {
    torch.Tensor.copy_,
    torch.Tensor.set_,
    torch.Tensor.cpu,
    torch.Tensor.numpy,
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.detach,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.is_tensor,
    torch.is_floating_point,
    # Moving the weight in `Module.to` would copy it a second time.
    HAS_COMPATIBLE_TYPE,
    *_SPLITS,
}
# `tensor.shape` and `tensor.data = other` reach a function mode too. A setter must get the tensor it was called with,
# on any device: moving it would assign a copy.
_ATTRIBUTE_ACCESS = ("__get__", "__set__")
_MOVE_FUNCTIONS = (torch.Tensor.to, torch.Tensor.type_as)
# Functions with handlers that move arguments themselves.
_HANDLES_DEVICES = {
    *_MOVE_FUNCTIONS, *_SPLITS, *RANDOM_FUNCTIONS, torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.__getitem__,
}  # fmt: skip
# Types of functions that are implemented in C++, and of the methods that access an attribute.
_C_FUNCTIONS = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType)
# Names of the first parameter of torch functions whose handlers expect it as a positional argument; `torch.where` has
# both.
_FIRST_PARAMETERS = ("condition", "input", "tensor")


# Python functions of torch, by owner and name. A package that was imported earlier may have replaced some of them.
_ORIGINALS: dict[Any, dict[str, FunctionType]] = {
    owner: {name: value for name, value in vars(owner).items() if is_own_function(value)}
    for owner in (torch.nn.functional, torch.Tensor)
}
_ORIGINAL_FUNCTIONS = {function for functions in _ORIGINALS.values() for function in functions.values()}


def find_unpatched(func: Any) -> Any:
    """Return the function that a mode must run: torch's own one if a user's patch has replaced it.

    `torch.nn.functional.silu` passes the global name `silu` to the mode. If a user has replaced it by a wrapper that
    calls the original one, running the wrapper again would apply its change twice.
    """
    if isinstance(func, _C_FUNCTIONS) or func in _ORIGINAL_FUNCTIONS:
        return func
    for owner, functions in _ORIGINALS.items():
        for name, original in functions.items():
            if getattr(owner, name) is func:
                return original
    return func if is_own_function(func) else find_replaced_function(func)


class PipelineFunctionMode(TorchFunctionMode):
    """A torch function mode for pipeline code that applies handlers and moves CPU tensors to the device."""

    def __init__(self, handlers: dict[Any, Handler], host_transfer: HostTransfer) -> None:
        super().__init__()
        self.handlers = handlers
        self.host_transfer = host_transfer
        self.known_values: KnownValues | None = None
        """Values of small tensors on the device, if reading them would wait for it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one torch function, reading values of the device that are known on the CPU."""
        if self.known_values is None:
            return self._run(func, args, kwargs or {})
        return self.known_values.run(func, args, kwargs or {}, self._run)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one torch function with its handler, if any, moving CPU tensors to the device if needed."""
        func, handler = _find_handler(func, self.handlers)
        if handler is not None:
            if func not in _HANDLES_DEVICES:
                args, kwargs = self.host_transfer.align_arguments(func, args, kwargs)
            return _call_handler(handler, func, args, kwargs)
        if func in _MIXED_DEVICE_FUNCTIONS or getattr(func, "__name__", "") in _ATTRIBUTE_ACCESS:
            return func(*args, **kwargs)
        return self.host_transfer.run(func, args, kwargs)


class ModelFunctionMode(TorchFunctionMode):
    """A torch function mode for code inside a model, which only applies handlers.

    Inside a model, all tensors are already on the device.
    """

    def __init__(self, handlers: dict[Any, Handler]) -> None:
        super().__init__()
        self.handlers = handlers

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one torch function with its handler, if it has one."""
        func, handler = _find_handler(func, self.handlers)
        if handler is None:
            return func(*args, **(kwargs or {}))
        return _call_handler(handler, func, args, kwargs or {})


def _find_handler(func: Any, handlers: dict[Any, Handler]) -> tuple[Any, Handler | None]:
    """Return the function that a mode must run, and its handler."""
    unpatched = find_unpatched(func)
    # If the function was patched before this package was imported, the key of its handler is the patch.
    return unpatched, handlers.get(unpatched) or handlers.get(func)


def _call_handler(handler: Handler, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a handler, passing the first parameter of the torch function as a positional argument."""
    if not args:
        first = next((name for name in _FIRST_PARAMETERS if name in kwargs), None)
        if first is not None:
            args, kwargs = (kwargs[first],), {name: value for name, value in kwargs.items() if name != first}
    return handler(func, args, kwargs)


def make_host_transfer(plan: Plan, device: torch.device) -> HostTransfer:
    """Return a `HostTransfer` that moves CPU tensors to a device in the dtypes that the plan requires."""
    replacements = {
        getattr(torch, name): getattr(torch, other) for name, other in plan.replacements.value if other != "pairs"
    }
    workarounds = plan.workarounds.value
    return HostTransfer(
        device,
        replacements,
        clone_scalars="clone_scalars" in workarounds,
        complex_as_pairs="complex_pairs" in workarounds,
    )


def _make_handlers(
    plan: Plan, device: torch.device, replacements: dict[torch.dtype, torch.dtype]
) -> dict[Any, Handler]:
    """Return the handlers for the plan's workarounds, keyed by torch function."""
    workarounds = set(plan.workarounds.value)
    handlers: dict[Any, Handler] = {}
    # The order matters: dtypes and complex_pairs wrap the handlers that were added before them.
    if "dynamic_shapes" in workarounds:
        handlers |= {
            func: supporting_out(run) for func, run in dynamic_shapes.make_handlers(device, replacements).items()
        }
    if "zero_empty" in workarounds:
        handlers |= uninitialized_memory.make_zero_empty_handlers(device)
    if "ignore_beta_zero" in workarounds:
        handlers |= {func: supporting_out(run) for func, run in uninitialized_memory.make_beta_zero_handlers().items()}
    if "dtypes" in workarounds:
        handlers = dtypes.make_handlers(device, replacements, handlers)
    if "complex_pairs" in workarounds:
        handlers = complex_factories.make_handlers(device, handlers)
    if "attention" in workarounds:
        handlers |= sliced_attention.make_handlers(plan.attention.value)
    return handlers


def make_pipeline_function_mode(
    plan: Plan,
    device: torch.device,
    cpu_tensors: CpuTensors | None = None,
    side_stream_copy: SideStreamCopy | None = None,
    copy: CopyFunction = torch.Tensor.to,
) -> PipelineFunctionMode:
    """Return the function mode for one pipeline call; pass `side_stream_copy` if calls share the device.

    `copy` copies CPU tensors that are used together with device tensors, such as coefficients of the scheduler.
    """
    host_transfer = make_host_transfer(plan, device)
    host_transfer.cpu_tensors = cpu_tensors
    host_transfer.copy = copy
    handlers = _make_handlers(plan, device, host_transfer.replacements)
    handlers[torch.Tensor.numpy] = _convert_to_numpy
    # After the dtype handlers, which these replace: noise is drawn in float32 and cast before the copy.
    handlers |= noise.make_handlers(device, host_transfer.replacements, host_transfer.copy)
    if side_stream_copy is not None:
        handlers |= side_stream_copy.make_handlers(handlers)
    if cpu_tensors is not None:
        # Outermost: scheduler tensors must be recognized before another handler copies them.
        handlers |= {func: _keep_schedule_on_cpu(host_transfer, handlers.get(func)) for func in _MOVE_FUNCTIONS}
    mode = PipelineFunctionMode(handlers, host_transfer)
    if cpu_tensors is not None and not is_host(device):
        mode.known_values = KnownValues(device)
    return mode


def make_model_function_mode(plan: Plan, device: torch.device) -> ModelFunctionMode | None:
    """Return the function mode for use inside models; None if the plan has no workarounds."""
    if not plan.workarounds.value:
        return None
    replacements = make_host_transfer(plan, device).replacements
    handlers = _make_handlers(plan, device, replacements)
    if "noise" in plan.workarounds.value:
        handlers |= noise.make_handlers(device, replacements)
    return ModelFunctionMode(handlers)


def _convert_to_numpy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy a tensor to the CPU and convert it to an array.

    Motif-Video passes an image on the device to an image processor, which calls `numpy()` if it does not use
    torchvision (transformers 5.22, image_processing_backends.py).
    """
    return func(args[0].cpu(), *args[1:], **kwargs)


def _keep_schedule_on_cpu(host_transfer: HostTransfer, inner: Handler | None) -> Handler:
    """Return a handler for `tensor.to(device)` that leaves scheduler tensors on the CPU."""

    def move(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target, dtype = dtypes.parse_to_arguments(args[0], args[1:], kwargs)
        if host_transfer.stays_on_cpu(args[0], target) and not dtypes.requests_copy(args[1:], kwargs):
            return host_transfer.run(torch.Tensor.to, (args[0], dtype), {})
        if inner is not None:
            return inner(func, args, kwargs)
        return host_transfer.run(func, args, kwargs) if is_host(target) else func(*args, **kwargs)

    return move


def enter_model_mode(mode: ModelFunctionMode | None) -> tuple[list[PipelineFunctionMode], ModelFunctionMode | None]:
    """Replace this thread's active pipeline modes with the model mode.

    Return the arguments for `exit_model_mode`.
    """
    stack = read_function_modes()
    pipeline_modes: list[PipelineFunctionMode] = []
    while stack and isinstance(stack[-1], PipelineFunctionMode):
        pipeline_modes.append(pop_function_mode())
        stack.pop()
    # A model inside another model, or below a user's own mode, keeps the stack it is called with.
    model_mode = mode if pipeline_modes or not stack else None
    if model_mode is not None:
        push_function_mode(model_mode)
    return pipeline_modes, model_mode


def has_foreign_modes() -> bool:
    """Return whether a dispatch mode or another library's function mode is active in this thread.

    Compiled code and replayed graphs would skip it. The mode of `with torch.device(…)` does not count.
    """
    if count_dispatch_modes():
        return True
    own = (PipelineFunctionMode, ModelFunctionMode, DeviceContext)
    return bool(count_function_modes()) and not all(isinstance(mode, own) for mode in read_function_modes())


@contextmanager
def preserve_function_modes() -> Iterator[None]:
    """Restore anyaccel's modes on the stack of function modes after the `with` block.

    Ctrl-C can arrive between the push and the pop of a mode, which would leave the mode active permanently.
    Modes that code inside the block has added or removed stay so, such as that of `torch.set_default_device`.
    """
    before = read_function_modes()
    try:
        yield
    finally:
        now = read_function_modes()
        if [id(mode) for mode in now] != [id(mode) for mode in before]:
            for _ in now:
                pop_function_mode()
            for mode in _restore_own_modes(before, now):
                push_function_mode(mode)


def _restore_own_modes(before: list[Any], now: list[Any]) -> list[Any]:
    """Return the stack of modes with anyaccel's modes as before and the other modes as they are now."""
    own = (PipelineFunctionMode, ModelFunctionMode)
    stack = [mode for mode in before if isinstance(mode, own) or mode in now]
    added = [mode for mode in now if not isinstance(mode, own) and mode not in before]
    # The modes at the top belong to the running call, which removes them when it ends.
    top = len(stack)
    while top and isinstance(stack[top - 1], own):
        top -= 1
    # torch inserts the mode of a default device at the bottom.
    devices = [mode for mode in added if isinstance(mode, DeviceContext)]
    others = [mode for mode in added if not isinstance(mode, DeviceContext)]
    return [*devices, *stack[:top], *others, *stack[top:]]


def exit_model_mode(pipeline_modes: list[PipelineFunctionMode], model_mode: ModelFunctionMode | None) -> None:
    """Undo `enter_model_mode`: remove the model mode and restore the pipeline modes."""
    if model_mode is not None:
        pop_function_mode()
    for mode in reversed(pipeline_modes):
        push_function_mode(mode)
