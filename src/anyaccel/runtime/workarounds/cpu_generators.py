"""CPU generators where a pipeline creates a generator on the device, so that its noise is the same on every device.

LTX draws each window's noise from `torch.Generator(device=device).manual_seed(seed + start)`, for example
(pipeline_ltx_i2v_long_multi_prompt.py, diffusers 0.42). Such a generator draws other values than the CPU's, and Neuron
has none.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from anyaccel.emulator.torch_patch_registry import apply_patch, remove_patches, replace_class

__all__ = ["use_cpu_generators"]

_USER = "CPU generators"
_lock = threading.Lock()
_blocks: list[None] = []
# Device type for which this thread creates CPU generators.
_active = threading.local()


@contextmanager
def use_cpu_generators(device: torch.device) -> Iterator[None]:
    """Create CPU generators instead of generators on a device in this thread inside the `with` block."""
    before = getattr(_active, "device_type", None)
    with _lock:
        if not _blocks:
            apply_patch("torch.Generator", _replace, _USER)
        _blocks.append(None)
    _active.device_type = device.type
    try:
        yield
    finally:
        _active.device_type = before
        with _lock:
            _blocks.pop()
            if not _blocks:
                remove_patches(_USER)


def _replace(original: Any) -> Any:
    def build(device: Any = "cpu") -> Any:
        is_replaced = torch.device(device).type == getattr(_active, "device_type", None)
        return original(device="cpu") if is_replaced else original(device)

    return replace_class(original, build)
