"""Garbage collector control. No other module calls `gc`.

Reference counting frees almost everything. The collector frees objects in reference cycles, which it finds
by traversing all objects. With torch and diffusers imported, there are millions of objects, and one
collection takes 0.1 s or more.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["gc_paused", "ignore_existing_objects", "release_unreachable"]


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector inside the `with` block.

    For code that creates many objects and frees few, such as imports or compilation. Otherwise, such code
    spends a fifth of its time on garbage collection.
    """
    was_enabled = gc.isenabled()  # nested blocks must not enable it early
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def ignore_existing_objects() -> None:
    """Exempt all current objects from later collections, because they live until the process exits."""
    gc.freeze()


def release_unreachable(*, also_ignored: bool = False) -> None:
    """Free objects in reference cycles now, along with the device memory held by their tensors.

    Models and their hooks reference each other, so dropping the last reference to a pipeline does not free
    them. `also_ignored` includes the objects that `ignore_existing_objects` exempted.
    """
    if also_ignored:
        gc.unfreeze()
    gc.collect()
