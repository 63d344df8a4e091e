"""One spelling for what every vendor spells differently: seeds, noise, memory, number types, waiting.

Each function takes a name (`"hpu"`, `"cuda:1"`, `"auto"`) or a `torch.device`.
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
    """The number type to use on a device instead of one that it lacks: float32 for float64 on `mps`.

    Answers for devices that are not here too, from their sheets; a device that is here is asked where its sheet leaves
    the type in doubt. A type that nothing can stand in for, such as fp8, comes back as it is.
    """
    name = dtype_name(dtype)
    known = open_device(device).sheet if str(device) == "auto" else sheet(device)
    answer = known.dtype(name)
    doubted = isinstance(answer, DtypeLimit) and (answer.conditional or answer.contradicted_by)
    if doubted and is_available(known.name):
        known = open_device(device).sheet
    return dtype_of(known.adjusted_dtype(name))


def randn(
    shape: Sequence[int],
    *,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
) -> torch.Tensor:
    """Normal noise on a device, drawn on the host where the device has no random numbers.

    A generator is honoured and decides where the noise is drawn; a list of them draws one image each. Every type is
    drawn in float32 and cast, so that one seed gives one noise; a type that the device lacks becomes what
    `adjust_dtype` gives.
    """
    import torch

    size = _check_shape(shape)
    opened = open_device(device)
    asked = torch.get_default_dtype() if dtype is None else dtype_of(dtype_name(dtype))
    if not asked.is_floating_point:
        raise UsageError(f"noise has a floating type, not {asked}", hint="for example float32 or bfloat16")
    kind, target = dtype_of(opened.sheet.adjusted_dtype(dtype_name(asked))), opened.torch_device
    place = target if opened.sheet.rng_on_device else torch.device("cpu")
    if generator is None or isinstance(generator, torch.Generator):
        noise = _draw(size, generator, place)
    else:
        _check_generators(size, generator)
        noise = torch.cat([_draw((1, *size[1:]), one, place) for one in generator])
    return noise.to(kind).to(target)


def manual_seed(device: str | torch.device, seed: int) -> None:
    """Seed the host and all devices of that kind: `anyaccel.manual_seed("xpu", 7)`."""
    number = read_seed(seed)
    open_device(device).driver.manual_seed(number)


def device_count(device: str | torch.device = "auto") -> int:
    """How many devices of that kind this process sees; 0 where there are none."""
    if str(device) == "auto":
        return open_device().driver.count()
    name = sheet(device).name
    return open_device(name).driver.count() if is_available(name) else 0


def synchronize(device: str | torch.device = "auto") -> None:
    """Wait until the device has done all that was asked of it."""
    opened = open_device(device)
    opened.driver.synchronize(opened.index)


def empty_cache(device: str | torch.device = "auto") -> None:
    """Give cached memory back to the device."""
    open_device(device).driver.empty_cache()


def memory(device: str | torch.device = "auto") -> Memory:
    """Used, free and total memory of a device, in bytes."""
    opened = open_device(device)
    return opened.driver.memory(opened.index)


def max_memory(device: str | torch.device = "auto") -> int:
    """The most bytes held at once since the last `reset_peak_memory`."""
    opened = open_device(device)
    return opened.driver.max_memory(opened.index)


def reset_peak_memory(device: str | torch.device = "auto") -> None:
    """Start counting `max_memory` anew."""
    opened = open_device(device)
    opened.driver.reset_peak_memory(opened.index)


def supports_training(device: str | torch.device) -> bool:
    """Whether models can be trained on that kind of device, by its sheet."""
    return (open_device().sheet if str(device) == "auto" else sheet(device)).trains


def _draw(size: tuple[int, ...], generator: torch.Generator | None, place: torch.device) -> torch.Tensor:
    import torch

    # A generator draws only on its own device, whatever the sheet would choose.
    place = place if generator is None else generator.device
    return torch.randn(size, generator=generator, device=place, dtype=torch.float32)


def _check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    listed = isinstance(shape, Sequence) and not isinstance(shape, str)
    right = listed and all(isinstance(n, SupportsIndex) and not isinstance(n, bool) and index(n) >= 0 for n in shape)
    if not right:
        raise UsageError(f"a shape is a list of whole numbers from 0 up, not {shape!r}", hint="try (1, 4, 64, 64)")
    return tuple(index(length) for length in shape)


def _check_generators(size: tuple[int, ...], generators: Sequence[torch.Generator]) -> None:
    if not isinstance(generators, Sequence) or any(not hasattr(one, "manual_seed") for one in generators):
        raise UsageError(
            f"{generators!r} is no generator, and no list of them", hint="torch.Generator().manual_seed(7)"
        )
    if not size or len(generators) != size[0]:
        raise UsageError(
            f"{len(generators)} generators were given for a shape {size}",
            hint="give one generator, or a list with one for each image of the batch",
        )


def dtype_name(dtype: str | torch.dtype) -> str:
    """`float64`, from `"float64"`, `"fp64"`, `"torch.float64"` or `torch.float64`."""
    name = str(dtype).removeprefix("torch.")
    return str(dtype_of(_SHORT_NAMES.get(name, name))).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The number type of torch's by that name: `torch.bfloat16`."""
    import torch

    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype):
        known = [field.name for field in dataclasses.fields(Dtypes)]
        raise UnknownDtypeError(f"torch has no number type {name!r}", hint=nearest(name, known))
    return kind
