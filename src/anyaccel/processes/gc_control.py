"""The garbage collector: the only module that calls `gc`.

Reference counting frees almost everything. The collector finds the rest, objects in reference cycles, by walking all
objects that exist; after torch and diffusers are imported these are millions, and a walk takes 0.1 s and more.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["gc_paused", "ignore_existing_objects", "release_unreachable"]


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the collector in a block that creates many objects and drops few, such as imports and compilation.

    Without it, collections take a fifth of the time of such a block.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def ignore_existing_objects() -> None:
    """Exempt all objects that exist now from later collections, because they stay until the process ends."""
    gc.freeze()


def release_unreachable(*, also_ignored: bool = False) -> None:
    """Free objects in reference cycles now, and with them the device memory of their tensors.

    Models and the hooks on them refer to each other, so that dropping the last reference to a pipeline frees nothing.
    `also_ignored` includes what `ignore_existing_objects` exempted.
    """
    if also_ignored:
        gc.unfreeze()
    gc.collect()
