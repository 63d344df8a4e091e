"""Usages inside contexts of torch."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.differential.session import HALF_PRECISION, Session, usage

GROUP = "contexts of torch"


ONE_THREAD = {"served": "a mode applies to one thread, and a batch runs in the thread of any request"}


class Halving(TorchFunctionMode):
    """Function mode that halves the result of convolutions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Halve the output of `conv2d`."""
        output = func(*args, **(kwargs or {}))
        return output * 0.5 if func is torch.nn.functional.conv2d or func is torch.conv2d else output


class Counting(TorchDispatchMode):
    """Dispatch mode that counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count convolutions."""
        self.count += func is torch.ops.aten.convolution.default
        return func(*args, **(kwargs or {}))


@usage(GROUP, skip=ONE_THREAD)
def function_mode_around_one_call(session: Session) -> Any:
    """A `TorchFunctionMode` around the second of three calls."""
    pipe = session.make()
    first = session.run(pipe)
    with Halving():
        second = session.run(pipe)
    return {"before": first, "inside": second, "after": session.run(pipe)}


@usage(GROUP, skip=ONE_THREAD | {"cuda-captured": "the mode sees the earlier calls too"})
def dispatch_mode_counts_operations(session: Session) -> Any:
    """A `TorchDispatchMode` that counts convolutions."""
    pipe = session.make()
    with Counting() as mode:
        result = session.run(pipe)
    return {"result": result, "convolutions": mode.count}


def under(name: str, document: str, enter: Any) -> None:
    """Register a usage with the second of three calls inside a context."""

    def run(session: Session) -> Any:
        pipe = session.make()
        first = session.run(pipe)
        with enter():
            second = session.run(pipe)
        return {"before": first, "inside": second, "after": session.run(pipe)}

    run.__name__, run.__doc__ = name, document
    usage(GROUP)(run)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    """Set the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Any:
    """Use deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


under("call_under_no_grad", "A call under `torch.no_grad()`.", torch.no_grad)
under("call_under_inference_mode", "A call under `torch.inference_mode()`.", torch.inference_mode)
under("call_under_enable_grad", "A call under `torch.enable_grad()`.", torch.enable_grad)
under("call_under_default_dtype_float64", "A call with the default dtype float64.",
      functools.partial(default_dtype, torch.float64))  # fmt: skip
under("call_under_deterministic_algorithms", "A call with `torch.use_deterministic_algorithms(True)`.", deterministic)
under("call_under_fork_rng", "A call under `torch.random.fork_rng()`.",
      functools.partial(torch.random.fork_rng, devices=[]))  # fmt: skip


@contextlib.contextmanager
def matmul_precision() -> Any:
    """Allow lower precision of matrix products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


under("call_under_device_context", "A call inside `with torch.device('cpu')`.", functools.partial(torch.device, "cpu"))
under("call_under_sdpa_kernel", "A call inside `sdpa_kernel(SDPBackend.MATH)`.",
      functools.partial(torch.nn.attention.sdpa_kernel, torch.nn.attention.SDPBackend.MATH))  # fmt: skip
under("call_under_matmul_precision", "A call with `set_float32_matmul_precision('highest')`.", matmul_precision)
under("call_under_profiler", "A call inside `torch.profiler.profile()`.",
      functools.partial(torch.profiler.profile, activities=[torch.profiler.ProfilerActivity.CPU]))  # fmt: skip


@usage(
    GROUP,
    skip={
        "mps": "autocast is a feature of the real device", "neuron": "autocast is a feature of the real device",
        "served": "autocast applies to one thread, and a batch runs in the thread of any request",
    },
    compiled_tolerance=HALF_PRECISION,
)  # fmt: skip
def call_under_autocast(session: Session) -> Any:
    """A call inside `torch.autocast` with bfloat16."""
    pipe = session.make()
    first = session.run(pipe)
    with torch.autocast(session.device, dtype=torch.bfloat16):
        second = session.run(pipe)
    return {"before": first, "inside": second, "after": session.run(pipe)}


@usage(GROUP, skip=dict.fromkeys(("mps", "neuron"), "autocast is a feature of the real device"))
def accelerate_prepared_and_unwrapped(session: Session) -> Any:
    """`accelerator.prepare(unet)` with mixed precision, a call, then `unwrap_model(keep_fp32_wrapper=False)`."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=session.device == "cpu", mixed_precision="bf16")
    pipe = session.make()
    pipe.unet = accelerator.prepare(pipe.unet)
    first = session.run(pipe)
    pipe.unet = accelerator.unwrap_model(pipe.unet, keep_fp32_wrapper=False)
    return {"prepared": first, "unwrapped": session.run(pipe)}
