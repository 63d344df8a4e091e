"""Downloads from the Hub by diffusers: one progress bar, and the file in which a download failed.

Seen in diffusers 0.42.1 and in huggingface_hub 2.4. File paths are relative to their packages.
"""

from __future__ import annotations

import functools
import importlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["FailedDownload", "find_download_error", "find_failed_download", "showing_one_bar"]

_LOCK = threading.RLock()
# Name of the bar for the bytes of all files (_snapshot_download.py). huggingface_hub 0 does not have it.
_BYTES_BAR = "huggingface_hub.snapshot_download"
_URL = re.compile(r"/(?P<repository>[^/]+(/[^/]+)?)/resolve/[^/]+/(?P<file>.+)")


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
    is_gated: bool


def find_download_error() -> type[Exception]:
    """Return the base class of the errors of the HTTP library that huggingface_hub uses (errors.py)."""
    errors: Any = importlib.import_module("huggingface_hub.errors")
    base: type[Exception] = next(
        (kind for kind in errors.HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError"), errors.HfHubHTTPError
    )
    return base


def find_failed_download(error: BaseException) -> FailedDownload | None:
    """Return the file that an error is about, from the URL of the request."""
    errors: Any = importlib.import_module("huggingface_hub.errors")
    cause: BaseException | None = error
    while cause is not None:
        # httpx raises RuntimeError for an error without a request.
        request = getattr(cause, "_request", None) or getattr(getattr(cause, "response", None), "request", None)
        match = _URL.fullmatch(unquote(urlsplit(str(getattr(request, "url", ""))).path))
        if match:
            return FailedDownload(match["repository"], match["file"], isinstance(cause, errors.GatedRepoError))
        cause = cause.__cause__ or cause.__context__
    return None
