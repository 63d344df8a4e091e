"""Messages of other libraries: the only place where their loggers, warnings and progress bars are silenced.

Library calls (`anyaccel.place`, a pipeline's call) drop single messages that are wrong about what anyaccel does. Whole
libraries are silenced where the process is anyaccel's, in commands and in worker processes, and while
`anyaccel.explain` builds models from their configs only, since no message about those concerns the caller.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

__all__ = [
    "EXPERIMENTAL_ADVICE",
    "FLOAT32_ADVICE",
    "SAFETY_ADVICE",
    "drop_log_records",
    "drop_log_records_always",
    "log_errors_only",
    "no_progress_bars",
    "no_transformers_bars",
    "quiet_libraries",
    "silence_process",
    "use_process_local_tqdm_lock",
]

FLOAT32_ADVICE = ("diffusers.models.modeling_utils", "should be kept in float32")
"""Diffusers' advice against casting modules; `runtime/placement/place.py` follows it (seen in diffusers 0.42)."""
EXPERIMENTAL_ADVICE = ("diffusers.models.modeling_utils", "experimental feature")
"""Diffusers' advice that the interface of `enable_parallelism` may change (seen in diffusers 0.42)."""
_PIPELINES = "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion"
SAFETY_ADVICE = tuple((_PIPELINES + suffix, "disabled the safety checker") for suffix in ("", "_img2img", "_inpaint"))
"""Diffusers' advice about pipelines that are loaded without a safety checker (seen in diffusers 0.42)."""
_ADVICE = (FLOAT32_ADVICE, *SAFETY_ADVICE)
"""What is not for somebody who runs a command. Other warnings of diffusers are: it warns of prompts it cuts off."""


@contextmanager
def drop_log_records(logger: str, text: str = "") -> Iterator[None]:
    """Drop the records of one logger that contain a text during the block; without a text, all of them."""

    def is_kept(record: logging.LogRecord) -> bool:
        return text not in record.getMessage()

    logging.getLogger(logger).addFilter(is_kept)
    try:
        yield
    finally:
        logging.getLogger(logger).removeFilter(is_kept)


@functools.cache
def drop_log_records_always(logger: str, start: str) -> None:
    """Drop the records of one logger that start with a text, from now on; calling it again adds nothing."""
    logging.getLogger(logger).addFilter(lambda record: not record.getMessage().startswith(start))


def log_errors_only(library: str) -> None:
    """Log a library's errors only, from now on."""
    logging.getLogger(library).setLevel(logging.ERROR)


def silence_process() -> None:
    """Drop all warnings, logged or not, from now on: for worker processes whose messages concern nobody."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


@contextmanager
def quiet_libraries(*, everything: bool = False) -> Iterator[None]:
    """Drop libraries' messages to developers during the block, unless the user requested them.

    The user requests them with `-W` or with a variable such as `TRANSFORMERS_VERBOSITY`. `everything` is for runs whose
    messages concern nobody, such as a model that is built from its config only: it also drops warnings of diffusers and
    every Python warning.
    """
    with ExitStack() as stack:
        for library in ("transformers", "diffusers") if everything else ("transformers",):
            stack.enter_context(_only_errors(library))
        for logger, text in _ADVICE:
            stack.enter_context(drop_log_records(logger, text))
        if everything or not sys.warnoptions:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", Warning if everything else FutureWarning)
            warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # half precision on a CPU that has none
        yield


@contextmanager
def _only_errors(library: str) -> Iterator[None]:
    """Log a library's errors only: the variable is read when it is imported, and by processes that are started."""
    variable, logger = f"{library.upper()}_VERBOSITY", logging.getLogger(library)
    if variable in os.environ:
        yield
        return
    level = logger.level
    os.environ[variable] = "error"
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        os.environ.pop(variable, None)
        logger.setLevel(level)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Show no bar of tqdm during the block; blocks of a modular pipeline have no option for it."""
    from tqdm import std

    original = std.tqdm.__init__
    std.tqdm.__init__ = functools.partialmethod(original, disable=True)
    try:
        yield
    finally:
        std.tqdm.__init__ = original


@contextmanager
def no_transformers_bars() -> Iterator[None]:
    """Show no bar of transformers during the block: it shows one per model.

    Its switch also turns off the hub's bars, so downloads have to be done before.
    """
    from transformers.utils import logging as transformers_logging

    switch: Any = transformers_logging  # whose functions have no annotations
    if not switch.is_progress_bar_enabled():
        yield
        return
    switch.disable_progress_bar()
    try:
        yield
    finally:
        switch.enable_progress_bar()


def use_process_local_tqdm_lock() -> None:
    """Replace tqdm's lock, a semaphore that a killed process leaves behind, by one of this process."""
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())
