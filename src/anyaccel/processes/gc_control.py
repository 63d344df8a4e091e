"""Control of Python's garbage collector; no other module calls `gc`.

Reference counting frees almost all objects. The collector frees objects in reference cycles, which
it finds by traversing all objects. With torch and diffusers imported, there are millions of
objects, and one collection takes 0.1 s or more.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["gc_paused", "ignore_existing_objects", "release_unreachable"]


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector inside the `with` block.

    Use this for code that creates many objects and frees few, such as imports or compilation. With the
    collector enabled, such code spends a fifth of its time on garbage collection.
    """
    was_enabled = gc.isenabled()  # nested blocks must not enable it early
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def ignore_existing_objects() -> None:
    """Exempt all existing objects from later garbage collections (`gc.freeze`).

    Call this if these objects live until the process exits.
    """
    gc.freeze()


def release_unreachable(*, also_ignored: bool = False) -> None:
    """Free objects in reference cycles now, along with the device memory held by their tensors.

    Models and their hooks reference each other, so they are not freed when the last reference to a
    pipeline is dropped. `also_ignored` includes objects that `ignore_existing_objects` exempted.
    """
    if also_ignored:
        gc.unfreeze()
    gc.collect()
