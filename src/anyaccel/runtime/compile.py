"""Compiling: `torch.compile` as the device's sheet says, and its cache folder while a call runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from anyaccel.runtime.placement import Placement

__all__ = ["compiling"]


@contextmanager
def compiling(placement: Placement) -> Iterator[None]:
    """Name the cache folder to the vendor's compiler while the block runs, and put the environment back."""
    variable = placement.plan.compile.value.cache_variable
    if not placement.cache_dir or not variable:
        yield
        return
    before = os.environ.get(variable)
    os.environ[variable] = placement.cache_dir
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = before
