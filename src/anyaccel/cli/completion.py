"""Values that the shell completes for options: devices, dtypes, formats, speed levels and memory modes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

__all__ = ["complete_device", "complete_dtype", "complete_memory", "complete_speed", "complete_weights"]


def complete_device(incomplete: str) -> list[str]:
    """Return the device names, aliases and products that start with a text; `virtual:` is followed by a device."""
    from anyaccel.backends.device_spec import AUTO, VIRTUAL_PREFIX
    from anyaccel.backends.registry import load_registry

    sheets = [sheet for backend in load_registry().backends.values() for sheet in backend.sheets]
    names = [AUTO, *(sheet.name for sheet in sheets)]
    names += [f"{VIRTUAL_PREFIX}{sheet.name}" for sheet in sheets if sheet.can_be_virtual]
    # Too many to list before the first letter is typed.
    if incomplete:
        names += [name for sheet in sheets for name in sheet.aliases]
        names += [product.name for sheet in sheets for product in sheet.products]
    return list(_match(names, incomplete))


def complete_dtype(incomplete: str) -> list[str]:
    """Return the dtypes of `--dtype` that start with a text."""
    return list(_match(["bfloat16", "float16", "float32"], incomplete))


def complete_weights(incomplete: str) -> list[str]:
    """Return the formats of `--weights` that start with a text."""
    from anyaccel.planning.options import WEIGHT_FORMATS

    return list(_match(WEIGHT_FORMATS, incomplete))


def complete_speed(incomplete: str) -> list[str]:
    """Return the speed levels that start with a text."""
    from anyaccel.planning.options import SPEEDS

    return list(_match(SPEEDS, incomplete))


def complete_memory(incomplete: str) -> list[str]:
    """Return the memory modes that start with a text."""
    from anyaccel.planning.memory import Residence

    return list(_match(get_args(Residence), incomplete))


def _match(names: list[str] | tuple[str, ...], incomplete: str) -> Iterator[str]:
    return (name for name in names if name.lower().startswith(incomplete.lower()))
