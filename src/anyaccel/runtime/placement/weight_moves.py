"""Moves of weights to a device: through pinned memory, and without function modes where none is needed."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from anyaccel.backends.device import OpenDevice
from anyaccel.backends.device_type_checks import is_host
from anyaccel.planning.plan import Plan
from anyaccel.runtime.introspection import is_quantized
from anyaccel.runtime.library_code import is_library_code
from anyaccel.runtime.workarounds.function_modes import has_foreign_modes, make_pipeline_function_mode

__all__ = ["has_own_move", "make_move_mode", "release_freed_memory", "stage_weights"]

_BUFFER_BYTES = 2**24
# Below this size, the copy itself takes less time than filling a buffer and recording an event.
_SMALLEST_BYTES = 2**20
_MOVING = ("_apply", "to")


def has_own_move(layers: Collection[torch.nn.Module]) -> bool:
    """Return whether the user's code defines how the weights of one of these layers are moved."""
    kinds = {type(layer) for layer in layers}
    own = any(name in vars(layer) for layer in layers for name in _MOVING)
    return own or not all(is_library_code(getattr(kind, name)) for kind in kinds for name in _MOVING)


def make_move_mode(
    plan: Plan, device: torch.device, models: Iterable[torch.nn.Module], move: Any = None
) -> AbstractContextManager[Any]:
    """Return the mode in which `move`, or the `to` of models, must run.

    A mode costs more time than the copies of small weights. It is not needed if the device has all dtypes, and if no
    code of the user runs, which could create tensors.
    """
    needed = plan.replacements.value or plan.workarounds.value or plan.parallel.value is not None
    if needed or not is_library_code(move) or any(has_own_move(list(model.modules())) for model in models):
        return make_pipeline_function_mode(plan, device)
    return nullcontext()


def stage_weights(models: Iterable[torch.nn.Module], opened: OpenDevice) -> None:
    """Move the large weights of models to a device with events, before `to` moves the others.

    A copy from pageable memory runs on one thread, which also waits for the page faults of memory-mapped files:
    https://github.com/safetensors/safetensors/issues/729. Here, all threads of torch fill a pinned buffer while the
    device reads another one.

    The weights of models that `to` may not move, or not as they are, are left to it: quantized ones, and those with
    code of the user. So are all weights in a mode of the user, which must see the copies.
    """
    if not opened.driver.has_events or has_foreign_modes():
        return
    if torch.__future__.get_overwrite_module_params_on_conversion():
        return
    copier = _StagedCopier(opened)
    for model in models:
        layers = list(model.modules())
        if is_quantized(model) or has_own_move(layers):
            continue
        for layer in layers:
            for weight in layer.parameters(recurse=False):
                if _is_large(weight, torch.nn.Parameter):
                    weight.data = copier.copy(weight.data)  # as `Module.to` does
            for name, buffer in list(layer.named_buffers(recurse=False)):
                if _is_large(buffer, torch.Tensor):
                    setattr(layer, name, copier.copy(buffer))
    # As after a copy from pageable memory, any stream can use the weights.
    copier.wait()


def release_freed_memory() -> None:
    """Return freed memory to the operating system, if the C library has a function for it.

    glibc keeps freed blocks below 32 MiB for later allocations of the same thread: after SDXL's UNet was cast and moved
    to the device, 5 GB (https://man7.org/linux/man-pages/man3/malloc_trim.3.html).
    """
    trim = _find_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _find_trim() -> Any:
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):  # TypeError: Windows has no library of the process
        return None


class _StagedCopier:
    """Copies CPU tensors to a device through two pinned buffers."""

    def __init__(self, opened: OpenDevice) -> None:
        self.opened = opened
        self.buffers: list[torch.Tensor] = []
        self.waits: list[Callable[[], None]] = []
        self.position = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device, which is complete after `wait`."""
        result = torch.empty_like(tensor, device=self.opened.torch_device)
        source, target = tensor.view(-1).view(torch.uint8), result.view(-1).view(torch.uint8)
        for start in range(0, source.numel(), _BUFFER_BYTES):
            part = source[start : start + _BUFFER_BYTES]
            buffer = self._next_buffer()[: part.numel()]
            buffer.copy_(part)
            target[start : start + _BUFFER_BYTES].copy_(buffer, non_blocking=True)
            self.waits[self.position] = self.opened.driver.record_event(self.opened.index)
            self.position = 1 - self.position
        return result

    def wait(self) -> None:
        """Wait until the device has read the buffers."""
        for wait in self.waits:
            wait()

    def _next_buffer(self) -> torch.Tensor:
        """Return the buffer at the position, which the device has read."""
        if len(self.buffers) <= self.position:
            self.buffers.append(torch.empty(_BUFFER_BYTES, dtype=torch.uint8, device="cpu").pin_memory())
            self.waits.append(lambda: None)
        self.waits[self.position]()
        return self.buffers[self.position]


def _is_large(tensor: torch.Tensor | None, kind: type[torch.Tensor]) -> bool:
    """Return whether a tensor is a plain, contiguous one on the CPU that is worth a staged copy."""
    return (
        tensor is not None
        and type(tensor) in (kind,)
        and type(tensor.data) is torch.Tensor
        and tensor.layout is torch.strided
        and is_host(tensor.device)
        and tensor.nbytes >= _SMALLEST_BYTES
        and tensor.is_contiguous()
        and tensor.grad is None
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference() or tensor.is_pinned())
    )
