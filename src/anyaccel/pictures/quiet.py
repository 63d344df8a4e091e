"""Libraries that say and cost less: what they tell developers is no word to a user, and workers leave nothing."""

from __future__ import annotations

import gc
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["importing", "quieten_libraries", "share_no_lock"]


def quieten_libraries() -> None:
    """Leave out what libraries say to their developers, unless the user asked for it by `-W` or a variable."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.warnoptions:
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # half precision on a host that has none


def share_no_lock() -> None:
    """Let progress bars of this process use a lock of its own: tqdm's is a semaphore that a killed process leaves."""
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())


@contextmanager
def importing() -> Iterator[None]:
    """Import and load much in the block: to look for garbage among it takes a fifth of the time, and finds none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
