"""CUDA graph capture, and the global settings that a captured graph depends on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anyaccel.backends.driver import Recorder

__all__ = ["make_recorder"]


def make_recorder(index: int, pool: Any) -> Recorder:
    """Return a recorder that captures CUDA graphs on one device, using one shared memory pool."""
    import torch

    def record(function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"  # "global" fails if another thread calls CUDA during the capture
        with torch.cuda.device(index), torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
            result = function()
        return result, graph.replay

    return Recorder(record, device_type="cuda", read_settings=_read_settings)


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
