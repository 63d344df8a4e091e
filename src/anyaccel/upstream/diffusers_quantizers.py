"""Loading of bitsandbytes weights on machines without a GPU for which bitsandbytes has kernels."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["allow_bitsandbytes_on_cpu"]

# `DiffusersAutoQuantizer` looks quantizers up in this table (quantizers/auto.py).
_METHODS = ("bitsandbytes_4bit", "bitsandbytes_8bit")
_LOCK = threading.RLock()


@contextmanager
def allow_bitsandbytes_on_cpu() -> Iterator[None]:
    """Let diffusers load bitsandbytes weights to the CPU, in this block, if it finds no GPU.

    The quantizers of diffusers then raise `No GPU found. A GPU is needed for quantization.`, although bitsandbytes
    itself supports the CPU (quantizers/bitsandbytes/bnb_quantizer.py).
    """
    from diffusers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    with _LOCK:
        before = {name: AUTO_QUANTIZER_MAPPING[name] for name in _METHODS if name in AUTO_QUANTIZER_MAPPING}
        AUTO_QUANTIZER_MAPPING.update({name: _make_cpu_quantizer(quantizer) for name, quantizer in before.items()})
        try:
            yield
        finally:
            AUTO_QUANTIZER_MAPPING.update(before)


def _make_cpu_quantizer(quantizer: Any) -> Any:
    class CpuQuantizer(quantizer):  # type: ignore[misc]
        has_gpu = True

        def validate_environment(self, *args: Any, **kwargs: Any) -> None:
            if not self.has_gpu:
                return  # the second check rejects models on the CPU
            try:
                super().validate_environment(*args, **kwargs)
            except RuntimeError:
                self.has_gpu = False

        def update_device_map(self, device_map: Any) -> Any:
            if device_map is None and self.has_gpu:
                device_map = super().update_device_map(None)
                # The tensors of a virtual device have a class of their own, which bitsandbytes does not accept.
                self.has_gpu = type(torch.empty(0, device=device_map[""])) is torch.Tensor
            return device_map if self.has_gpu else {"": "cpu"}

    CpuQuantizer.__name__ = quantizer.__name__
    return CpuQuantizer
