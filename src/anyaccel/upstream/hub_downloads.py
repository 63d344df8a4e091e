"""Downloads from the Hub by diffusers: one progress bar, and the file in which a download failed.

Seen in diffusers 0.42.1 and in huggingface_hub 2.4. File paths are relative to their packages.
"""

from __future__ import annotations

import errno
import functools
import importlib
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["FailedDownload", "find_download_error", "find_failed_download", "showing_one_bar"]

_LOCK = threading.RLock()
# Name of the bar for the bytes of all files (_snapshot_download.py). huggingface_hub 0 does not have it.
_BYTES_BAR = "huggingface_hub.snapshot_download"


@contextmanager
def showing_one_bar() -> Iterator[None]:
    """Show one progress bar for all files of a repository that diffusers downloads in this block."""
    bar = _make_bar_class()
    if bar is None:
        yield
        return
    # pipelines/pipeline_utils.py: `DiffusionPipeline.download` calls it without `tqdm_class`.
    module: Any = importlib.import_module("diffusers.pipelines.pipeline_utils")
    with _LOCK:
        download = module.snapshot_download
        module.snapshot_download = functools.partial(download, tqdm_class=bar)
        try:
            yield
        finally:
            module.snapshot_download = download


@functools.cache
def _make_bar_class() -> type | None:
    library: Any = importlib.import_module("huggingface_hub")
    if library.__version__.startswith("0."):
        return None
    base: Any = importlib.import_module("huggingface_hub.utils").tqdm

    class DownloadBar(base):  # type: ignore[misc]
        """The bar for the bytes of all files. The bars for transfers and for the number of files are hidden."""

        def __init__(self, *args: Any, **options: Any) -> None:
            if options.get("name") != _BYTES_BAR:
                options["disable"] = True
            super().__init__(*args, **{**options, "desc": "Downloading"})

        def set_description(self, desc: str | None = None, refresh: bool = True) -> None:
            """Keep the description: the library uses that of another step."""

    return DownloadBar


@dataclass(frozen=True)
class FailedDownload:
    """A file that could not be downloaded."""

    repository: str
    file: str
    reason: Literal["connection", "disk", "gated"]


def find_download_error() -> type[Exception]:
    """Return the base class of the errors of the HTTP library that huggingface_hub uses (errors.py)."""
    errors: Any = importlib.import_module("huggingface_hub.errors")
    base: type[Exception] = next(
        (kind for kind in errors.HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError"), errors.HfHubHTTPError
    )
    return base


def find_failed_download(error: BaseException) -> FailedDownload | None:
    """Return the file whose download failed; None if the repository does not have it, and without a network."""
    errors: Any = importlib.import_module("huggingface_hub.errors")
    is_gated = isinstance(error, errors.GatedRepoError)
    absent = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError)
    if isinstance(error, absent) and not is_gated:
        return None
    # The error itself does not name the file: it can be one of the HTTP library or of the file system.
    calls = [
        frame.f_locals
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name == "hf_hub_download" and "filename" in frame.f_locals
    ]
    if not calls:
        return None
    disk_is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    reason: Any = "gated" if is_gated else "disk" if disk_is_full else "connection"
    return FailedDownload(calls[-1]["repo_id"], calls[-1]["filename"], reason)
