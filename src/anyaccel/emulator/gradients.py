"""Gradients on virtual devices: the autograd engine, and composite operations that are not decomposed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

from anyaccel.backends.device_type_checks import is_host
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.tensor import VirtualTensor, wrap
from anyaccel.emulator.torch_patch_registry import apply_patch
from anyaccel.errors import VirtualDeviceError
from anyaccel.upstream.torch_autograd_internals import (
    ReportedAccelerator,
    attention_in_parts,
    ignore_stream_changes,
    skip_autograd,
)
from anyaccel.upstream.torch_internals import find_guard_table, read_device_type, read_private_use_name

__all__ = ["install_gradients", "make_differentiable"]

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def install_gradients(accelerator: VirtualAccelerator) -> None:
    """Make the autograd engine accept tensors on the registered virtual device.

    If the installed torch does not allow it, `backward` raises VirtualDeviceError.
    """
    report: AbstractContextManager[None] = nullcontext()
    problem: VirtualDeviceError | None = None
    try:
        report = _prepare_engine(accelerator.name)
    except VirtualDeviceError as error:
        problem = error

    def run_in_this_thread(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def run_backward(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            types = {output.device.type for output in outputs if isinstance(output, torch.Tensor)}
            if problem is not None and accelerator.name in types:
                raise VirtualDeviceError(problem.message, hint=problem.hint)
            # A loss on the CPU can depend on virtual tensors; one on a real accelerator is not our concern.
            if any(type_ != accelerator.name and not is_host(type_) for type_ in types):
                return run(outputs, *args, **kwargs)
            # The engine creates one thread per device, for the devices that exist at the first call of the process.
            with torch.autograd.set_multithreading_enabled(False), report:
                return run(outputs, *args, **kwargs)

        return run_backward

    apply_patch("torch.autograd._engine_run_backward", run_in_this_thread, "emulator")


def _prepare_engine(name: str) -> AbstractContextManager[None]:
    """Return a context manager in which the engine accepts tensors on the device."""
    private_use = int(read_device_type("PrivateUse1"))
    if read_private_use_name() == name:
        # Without the table, only exceptions during the backward pass are a problem.
        with suppress(VirtualDeviceError):
            ignore_stream_changes(find_guard_table(private_use + 1)[private_use])
        return nullcontext()
    ignore_stream_changes(find_guard_table(private_use + 1)[int(read_device_type(name.upper()))])
    return ReportedAccelerator(name)


def make_differentiable(func: Any) -> Callable[..., Any]:
    """Return an autograd kernel for a composite operation that has its own kernel on the device.

    Without it, the gradient would end at the operation, because only the parts of a composite operation have
    derivatives.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        if not torch.is_grad_enabled() or not any(_requires_grad(value) for value in values):
            with skip_autograd():
                return func(*args, **kwargs)
        if _is_random(func, args, kwargs):  # the backward pass of `_Composite` would draw again
            return _find_parts(func)(*args, **kwargs)
        return _Composite.apply(func, tuple(kwargs), *values)

    return run


def _is_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return func is _ATTENTION and bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))


def _find_parts(func: Any) -> Callable[..., Any]:
    """Return a function that runs a composite operation as several operations that have derivatives."""
    # torch's own decomposition of attention chooses a kernel, and fails for a device type without kernels.
    return _attend if func is _ATTENTION else func.decompose


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    output: torch.Tensor = attention_in_parts(query, key, value, attn_mask, dropout_p, is_causal, **options)[0]
    return output


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


class _Composite(torch.autograd.Function):
    """A composite operation that runs as one operation; its gradient is that of the same operation on the CPU."""

    @staticmethod
    def forward(ctx: Any, func: Any, names: tuple[str, ...], *values: Any) -> Any:
        """Run the operation on the device; `names` are the names of the last values, which are keyword arguments."""
        ctx.func, ctx.names = func, names
        ctx.others = [None if isinstance(value, torch.Tensor) else value for value in values]
        ctx.positions = [position for position, value in enumerate(values) if isinstance(value, torch.Tensor)]
        ctx.save_for_backward(*[values[position] for position in ctx.positions])
        with skip_autograd():
            return _call(func, names, values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients of the inputs, differentiable if the caller requests it (`create_graph`)."""
        values = list(ctx.others)
        for position, tensor in zip(ctx.positions, ctx.saved_tensors, strict=True):
            values[position] = tensor
        # The first two inputs are the operation and the names.
        wanted = [position for position in ctx.positions if ctx.needs_input_grad[position + 2]]
        if torch.is_grad_enabled():
            for position in wanted:  # views, because one tensor can be query, key and value
                values[position] = values[position].view_as(values[position])
            output = _call(_find_parts(ctx.func), ctx.names, values)
            tensors = [values[position] for position in wanted]
            results = [*torch.autograd.grad(output, tensors, gradients[0], create_graph=True)]
        else:
            results = _differentiate_on_cpu(ctx.func, ctx.names, values, wanted, gradients[0])
        found = dict(zip(wanted, results, strict=True))
        return None, None, *[found.get(position) for position in range(len(values))]


def _call(function: Callable[..., Any], names: tuple[str, ...], values: Sequence[Any]) -> Any:
    count = len(values) - len(names)
    return function(*values[:count], **dict(zip(names, values[count:], strict=True)))


def _differentiate_on_cpu(
    func: Any, names: tuple[str, ...], values: Sequence[Any], wanted: list[int], gradient: torch.Tensor
) -> list[torch.Tensor]:
    """Return the gradients of an operation for the values at the positions in `wanted`, computed on the CPU."""
    inner = [_unwrap(value) for value in values]
    for position in wanted:
        inner[position] = inner[position].detach().requires_grad_()
    with torch.enable_grad():
        output = _call(func, names, inner)
    results = torch.autograd.grad(output, [inner[position] for position in wanted], _unwrap(gradient))
    return [
        wrap(result, values[position].device) if isinstance(values[position], VirtualTensor) else result
        for position, result in zip(wanted, results, strict=True)
    ]


def _unwrap(value: Any) -> Any:
    return value._inner if isinstance(value, VirtualTensor) else value
