"""Functions that silence other libraries' log messages, warnings and progress bars.

No other module silences libraries. Library calls (`anyaccel.place`, a pipeline call) drop only
individual messages that do not apply to anyaccel. Entire libraries are silenced in command-line
commands, in worker processes, and while `anyaccel.explain` builds models without weights.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
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
    "quiet_command",
    "quiet_libraries",
    "silence_process",
    "use_process_local_tqdm_lock",
]

# diffusers 0.42 recommends keeping some modules in float32; `runtime/placement/place.py` already does.
FLOAT32_ADVICE = ("diffusers.models.modeling_utils", "should be kept in float32")
# diffusers 0.42 warns that the API of `enable_parallelism` may change.
EXPERIMENTAL_ADVICE = ("diffusers.models.modeling_utils", "experimental feature")
_PIPELINES = "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion"
# diffusers 0.42 warns about pipelines without a safety checker.
SAFETY_ADVICE = tuple((_PIPELINES + suffix, "disabled the safety checker") for suffix in ("", "_img2img", "_inpaint"))
# diffusers 0.42 warns that the API of guiders, which modular pipelines use, may change.
_GUIDER_ADVICE = ("diffusers.guiders.guider_utils", "experimental feature")
# diffusers 0.42 logs the traceback of an error in a block, and raises the error.
_BLOCK_ERROR = ("diffusers.modular_pipelines.modular_pipeline", "Error in block")
# Messages that commands drop. Other warnings of diffusers are shown, for example about truncated prompts.
_ADVICE = (FLOAT32_ADVICE, _GUIDER_ADVICE, _BLOCK_ERROR, *SAFETY_ADVICE)


@contextmanager
def drop_log_records(logger: str, text: str = "") -> Iterator[None]:
    """Drop log records from a logger inside the `with` block if they contain `text`.

    An empty `text` drops all records.
    """

    def keep(record: logging.LogRecord) -> bool:
        return text not in record.getMessage()

    logging.getLogger(logger).addFilter(keep)
    try:
        yield
    finally:
        logging.getLogger(logger).removeFilter(keep)


@functools.cache
def drop_log_records_always(logger: str, start: str) -> None:
    """Permanently drop a logger's records that begin with `start`; repeated calls have no effect."""
    logging.getLogger(logger).addFilter(_make_filter(start))


@functools.cache  # a logger does not add the same filter twice
def _make_filter(start: str) -> Callable[[logging.LogRecord], bool]:
    return lambda record: not record.getMessage().startswith(start)


def log_errors_only(library: str) -> None:
    """Set a library's log level to ERROR."""
    logging.getLogger(library).setLevel(logging.ERROR)


def silence_process() -> None:
    """Silence Python warnings and log records up to level WARNING until the process exits.

    Use this only in worker processes.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


@contextmanager
def quiet_libraries(*, everything: bool = False) -> Iterator[None]:
    """Hide library messages for developers inside the `with` block, unless the user enabled them.

    These are transformers log records below ERROR, some advice from diffusers, and FutureWarnings.
    The user enables them with Python's `-W` option or a variable such as `TRANSFORMERS_VERBOSITY`.
    With `everything`, diffusers log records below ERROR and all Python warnings are hidden too, for
    example while a model is built without weights.
    """
    with ExitStack() as stack:
        for library in ("transformers", "diffusers") if everything else ("transformers",):
            stack.enter_context(_only_errors(library))
        for logger, text in _ADVICE:
            stack.enter_context(drop_log_records(logger, text))
        if everything or not sys.warnoptions:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", Warning if everything else FutureWarning)
            warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # half precision on a CPU without support
        yield


# diffusers 0.42 warns about the part of a prompt that a text encoder cannot read.
_ABOUT_THE_PROMPT = "input was truncated"


@contextmanager
def quiet_command() -> Iterator[None]:
    """Hide the warnings and log records below ERROR of libraries inside the `with` block, for one command.

    Warnings about the user's prompt are shown. As with `quiet_libraries`, Python's `-W` option and variables such as
    `DIFFUSERS_VERBOSITY` enable the messages.
    """
    make_record = logging.getLogRecordFactory()
    hidden = {"diffusers"} - {name for name in ("diffusers",) if f"{name.upper()}_VERBOSITY" in os.environ}

    def make_quiet_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        library = record.name.partition(".")[0]
        if library in hidden and record.levelno < logging.ERROR and _ABOUT_THE_PROMPT not in record.getMessage():
            record.levelno = -1  # below the level of every handler
        return record

    with quiet_libraries(), ExitStack() as stack:
        if not sys.warnoptions:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        # A factory, because the handlers of libraries do not exist before their import.
        logging.setLogRecordFactory(make_quiet_record)
        stack.callback(logging.setLogRecordFactory, make_record)
        yield


@contextmanager
def _only_errors(library: str) -> Iterator[None]:
    """Set a library's log level to ERROR inside the `with` block.

    Do nothing if its verbosity variable, such as `DIFFUSERS_VERBOSITY`, is set.
    """
    # The variable covers later imports and child processes, the level a library that is already imported.
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
    """Hide tqdm progress bars inside the `with` block."""
    # Blocks of a modular pipeline have no option to disable their bars.
    from tqdm import std

    original = std.tqdm.__init__
    std.tqdm.__init__ = functools.partialmethod(original, disable=True)
    try:
        yield
    finally:
        std.tqdm.__init__ = original


@contextmanager
def no_transformers_bars() -> Iterator[None]:
    """Hide the progress bars that transformers shows for model loading inside the `with` block.

    This also hides the download bars of huggingface_hub, so download models before the block.
    """
    from transformers.utils import logging as transformers_logging

    switch: Any = transformers_logging  # its functions have no annotations
    if not switch.is_progress_bar_enabled():
        yield
        return
    switch.disable_progress_bar()
    try:
        yield
    finally:
        switch.enable_progress_bar()


def use_process_local_tqdm_lock() -> None:
    """Replace tqdm's lock, which is shared between processes, with a process-local lock."""
    # The default is a named semaphore, which a killed process leaks: https://github.com/tqdm/tqdm/issues/611
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())
