"""CUDA graph capture, and the global settings that a captured graph depends on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from anyaccel.backends.driver import Recorder

__all__ = ["make_recorder"]


# Graphs of failed captures: the allocator of pinned memory keeps a pointer to them.
_FAILED_GRAPHS: list[Any] = []


def make_recorder(index: int, pools: list[Any]) -> Recorder:
    """Return a recorder that captures CUDA graphs on one device, using the last of the device's memory pools.

    A capture that fails adds a pool, for all recorders of the device: its own can no longer be used.
    """
    import torch

    def record(function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"  # "global" fails if another thread calls CUDA during the capture
        # The stream, because `torch.cuda.graph` does not switch back to it if the capture fails.
        stream = torch.cuda.stream(torch.cuda.current_stream(index))
        try:
            with torch.cuda.device(index), stream, torch.cuda.graph(graph, pool=pools[-1].id, capture_error_mode=mode):
                result = function()
        except BaseException:
            _FAILED_GRAPHS.append(graph)
            _end_failed_capture(index, pools[-1].id)
            pools.append(torch.cuda.MemPool())
            raise
        return result, graph.replay

    return Recorder(record, device_type="cuda", read_settings=_read_settings)


def _end_failed_capture(index: int, pool: Any) -> None:
    """Restore the state that torch leaves behind if a capture fails.

    `CUDAGraph.capture_end` raises before it stops the allocation to the graph's memory pool and before it
    resets the device's generator (aten/src/ATen/cuda/CUDAGraph.cpp, torch 2.11). Random functions on the
    device, and every later capture with the same pool, would then fail.
    """
    import torch

    internals: Any = torch._C
    with contextlib.suppress(RuntimeError):
        internals._cuda_endAllocateToPool(index, pool)
        internals._cuda_releasePool(index, pool)
    # A capture that succeeds resets the generator.
    with torch.cuda.device(index), torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros(1, device=f"cuda:{index}")


def _read_settings() -> tuple[Any, ...]:
    """Return the global torch settings that affect kernel selection.

    They include determinism, TF32, reduced-precision reductions, cuDNN, cuBLAS and the attention backends.
    """
    import torch

    backends: Any = torch.backends
    matmul, cudnn = backends.cuda.matmul, backends.cudnn
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        *_read_tf32(torch, matmul, cudnn),
        *(getattr(matmul, f"allow_{name}_reduced_precision_reduction") for name in ("fp16", "bf16")),
        getattr(matmul, "allow_fp16_accumulation", None),  # since torch 2.7
        *(getattr(cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
        *(getattr(backends.cuda, f"{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "math", "cudnn")),
        backends.cuda.fp16_bf16_reduction_math_sdp_allowed(),
        backends.cuda.preferred_blas_library(),
    )


def _read_tf32(torch: Any, matmul: Any, cudnn: Any) -> tuple[Any, ...]:
    """Return whether matrix products and convolutions use TF32."""
    # The old settings raise an error after the new ones were set, and the new ones do not exist before torch 2.9:
    # https://docs.pytorch.org/docs/2.13/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
    if not hasattr(cudnn, "conv"):
        return torch.get_float32_matmul_precision(), cudnn.allow_tf32
    return matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
