"""`torch.autocast` for the device type `meta`, which torch rejects."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from anyaccel.emulator.torch_patch_registry import patched

__all__ = ["accept_meta_autocast"]


@contextmanager
def accept_meta_autocast() -> Iterator[None]:
    """Let models use `torch.autocast(tensor.device.type)` on `meta` inside the `with` block, without an effect."""
    with patched("torch.amp.autocast_mode.autocast.__init__", _ignore_meta, "explain"):
        yield


def _ignore_meta(init: Any) -> Any:
    @functools.wraps(init)
    def initialize(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "meta":
            init(self, "cpu", enabled=False)
        else:
            init(self, device_type, *args, **kwargs)

    return initialize
