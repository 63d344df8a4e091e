"""Device-independent functions for seeds, noise, memory, dtypes and synchronization.

Each function accepts a name (`"hpu"`, `"cuda:1"`, `"auto"`) or a `torch.device`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, SupportsIndex

from anyaccel.backends.claim import DtypeLimit
from anyaccel.backends.device import is_available, open_device, sheet
from anyaccel.backends.driver import Memory
from anyaccel.backends.sheet import Dtypes
from anyaccel.call_limits import read_seed
from anyaccel.errors import UnknownDtypeError, UsageError, nearest

if TYPE_CHECKING:
    import torch

__all__ = [
    "adjust_dtype",
    "device_count",
    "dtype_name",
    "dtype_of",
    "empty_cache",
    "manual_seed",
    "max_memory",
    "memory",
    "randn",
    "reset_peak_memory",
    "supports_training",
    "synchronize",
]

_SHORT_NAMES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def adjust_dtype(dtype: str | torch.dtype, device: str | torch.device) -> torch.dtype:
    """Return a dtype that the device supports, for example float32 instead of float64 on `mps`.

    For a device that is not available, the result is based on its sheet. A dtype without a replacement,
    such as fp8, is returned unchanged.
    """
    name = dtype_name(dtype)
    device_sheet = open_device(device).sheet if str(device) == "auto" else sheet(device)
    answer = device_sheet.dtype(name)
    uncertain = isinstance(answer, DtypeLimit) and (answer.conditional or answer.contradicted_by)
    # Opening probes the device. It also initializes it, so it is avoided if the sheet is certain.
    if uncertain and is_available(device_sheet.name):
        device_sheet = open_device(device).sheet
    return dtype_of(device_sheet.adjusted_dtype(name))


def randn(
    shape: Sequence[int],
    *,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
) -> torch.Tensor:
    """Return normally distributed noise on a device.

    The noise is drawn on the CPU if the device cannot generate random numbers. A generator draws on its
    own device; in a list of generators, each one draws the noise for one image. Noise is drawn in
    float32 and then cast, so a seed produces the same noise in every dtype. A dtype that the device
    does not support is replaced as in `adjust_dtype`.
    """
    import torch

    size = _check_shape(shape)
    opened = open_device(device)
    requested = torch.get_default_dtype() if dtype is None else dtype_of(dtype_name(dtype))
    if not requested.is_floating_point:
        raise UsageError(
            f"noise requires a floating-point dtype, not {requested}",
            hint="use a floating-point dtype such as float32 or bfloat16",
        )
    adjusted, target = dtype_of(opened.sheet.adjusted_dtype(dtype_name(requested))), opened.torch_device
    source = target if opened.sheet.rng_on_device else torch.device("cpu")
    if generator is None or isinstance(generator, torch.Generator):
        noise = _draw(size, generator, source)
    else:
        _check_generators(size, generator)
        noise = torch.cat([_draw((1, *size[1:]), entry, source) for entry in generator])
    # Cast before the copy: half precision copies half the bytes.
    return noise.to(adjusted).to(target)


def manual_seed(device: str | torch.device, seed: int) -> None:
    """Seed the CPU and all devices of the given type: `anyaccel.manual_seed("xpu", 7)`."""
    checked = read_seed(seed)
    open_device(device).driver.manual_seed(checked)


def device_count(device: str | torch.device = "auto") -> int:
    """Return the number of devices of the given type that this process can use; 0 if there are none."""
    if str(device) == "auto":
        return open_device().driver.count()
    # 0 for a known device that is not available, like torch.cuda.device_count().
    name = sheet(device).name
    return open_device(name).driver.count() if is_available(name) else 0


def synchronize(device: str | torch.device = "auto") -> None:
    """Wait until the device has finished all enqueued work."""
    opened = open_device(device)
    opened.driver.synchronize(opened.index)


def empty_cache(device: str | torch.device = "auto") -> None:
    """Release the unused memory that the device's caching allocator holds."""
    open_device(device).driver.empty_cache()


def memory(device: str | torch.device = "auto") -> Memory:
    """Return the used, free and total memory of a device in bytes."""
    opened = open_device(device)
    return opened.driver.memory(opened.index)


def max_memory(device: str | torch.device = "auto") -> int:
    """Return the device's peak memory use in bytes since the last `reset_peak_memory`."""
    opened = open_device(device)
    return opened.driver.max_memory(opened.index)


def reset_peak_memory(device: str | torch.device = "auto") -> None:
    """Reset the peak memory use that `max_memory` returns."""
    opened = open_device(device)
    opened.driver.reset_peak_memory(opened.index)


def supports_training(device: str | torch.device) -> bool:
    """Return whether a device supports training, according to its sheet."""
    return (open_device().sheet if str(device) == "auto" else sheet(device)).trains


def _draw(size: tuple[int, ...], generator: torch.Generator | None, device: torch.device) -> torch.Tensor:
    import torch

    # torch raises if the generator is on another device than the result.
    device = device if generator is None else generator.device
    return torch.randn(size, generator=generator, device=device, dtype=torch.float32)


def _check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    # SupportsIndex accepts NumPy integers and rejects floats.
    is_list = isinstance(shape, Sequence) and not isinstance(shape, str)
    valid = is_list and all(isinstance(n, SupportsIndex) and not isinstance(n, bool) and index(n) >= 0 for n in shape)
    if not valid:
        raise UsageError(
            f"shape must be a sequence of non-negative integers, not {shape!r}", hint="for example (1, 4, 64, 64)"
        )
    return tuple(index(length) for length in shape)


def _check_generators(size: tuple[int, ...], generators: Sequence[torch.Generator]) -> None:
    if not isinstance(generators, Sequence) or any(not hasattr(entry, "manual_seed") for entry in generators):
        raise UsageError(
            f"generator must be a torch.Generator or a list of them, not {generators!r}",
            hint="use torch.Generator().manual_seed(7)",
        )
    # As in diffusers' randn_tensor, the first dimension is the batch.
    if not size or len(generators) != size[0]:
        batch = f"a batch size of {size[0]}" if size else "no batch dimension"
        raise UsageError(
            f"got {len(generators)} generator{'s' * (len(generators) != 1)}, but shape {size} has {batch}",
            hint="pass a single generator, or a list with one generator per image",
        )


def dtype_name(dtype: str | torch.dtype) -> str:
    """Return the canonical dtype name: `float64` for `"fp64"`, `"torch.float64"` or `torch.float64`."""
    name = str(dtype).removeprefix("torch.")
    return str(dtype_of(_SHORT_NAMES.get(name, name))).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype with this name, such as `torch.float16`; raise if the name is unknown."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        names = [field.name for field in dataclasses.fields(Dtypes)]
        raise UnknownDtypeError(f"unknown dtype {name!r}", hint=nearest(name, names))
    return dtype
