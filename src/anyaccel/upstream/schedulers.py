"""Schedulers that can replace one another (schedulers/scheduling_utils.py in diffusers 0.42.1)."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["list_compatible_schedulers"]

# For models with an LCM-LoRA or a TCD-LoRA, diffusers' documentation uses these instead of any of the others, although
# it does not list them as compatible.
_FOR_LORAS = ("LCMScheduler", "TCDScheduler")
_KARRAS = "KarrasDiffusionSchedulers"


def list_compatible_schedulers(name: str) -> set[str]:
    """Return the class names of the schedulers that can replace a scheduler class, including itself."""
    library: Any = importlib.import_module("diffusers")
    kind: Any = getattr(library, name, None)
    # The property `compatibles` requires an object, and some schedulers cannot be created without arguments.
    if not hasattr(kind, "_get_compatibles"):
        return {name}
    names = {item.__name__ for item in kind._get_compatibles()} | {name}
    utils: Any = importlib.import_module("diffusers.schedulers.scheduling_utils")
    if {item.name for item in getattr(utils, _KARRAS)} <= names | {"DPMSolverSDEScheduler"}:
        names |= {item for item in _FOR_LORAS if hasattr(library, item)}
    return names
