"""Libraries that say and cost less: what they tell developers is no word to a user, and workers leave nothing."""

from __future__ import annotations

import os
import sys
import threading
import warnings

__all__ = ["quieten_libraries", "share_no_lock"]


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
