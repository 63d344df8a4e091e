"""Errors of diffusers about models, converted to errors with a hint."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anyaccel.embedded.model import NAME
from anyaccel.errors import AnyaccelError, MissingLibraryError, ModelError, ModelFileError, first_line
from anyaccel.upstream.diffusers_quantizers import allow_bitsandbytes_on_cpu, find_single_file_error
from anyaccel.upstream.hub_downloads import FailedDownload, find_download_error, find_failed_download, showing_one_bar

__all__ = ["call_diffusers"]

# The names of the packages of quantizers that `pip install` accepts.
_QUANTIZATION_LIBRARIES = ("bitsandbytes", "gguf", "optimum-quanto", "torchao")


def call_diffusers(function: Callable[..., Any], model: str, options: dict[str, Any]) -> Any:
    """Call a diffusers loading function, and convert its errors to a `ModelError` with a hint."""
    try:
        with allow_bitsandbytes_on_cpu(), showing_one_bar():
            return function(model, **options)
    except AnyaccelError:
        raise
    except ImportError as error:
        library = next((name for name in _QUANTIZATION_LIBRARIES if name in str(error)), "")
        if not library:
            raise
        raise MissingLibraryError(
            f"cannot load {model}: it has weights that were quantized with {library}: {first_line(error)}",
            hint=f"pip install {library}",
        ) from error
    except (OSError, ValueError, LookupError, AttributeError, find_single_file_error(), find_download_error()) as error:
        failed = find_failed_download(error)
        if failed is not None:
            raise _make_download_error(failed, error) from error
        message = first_line(error)
        hint = f"check that the files in {model} are complete"
        custom = options.get("custom_pipeline")
        if "were passed" in message:  # "… expected ['unet', 'vae'], but only {'vae'} were passed."
            hint = "pass the missing components by name: from_pretrained(…, name=component)"
        elif custom is not None and isinstance(error, OSError):
            hint = f"check the name {custom!r}, which is not that of a local file, and the network connection"
        elif not Path(model).exists():
            hint = (
                "check the model name and the network connection; without a network, the model must be cached locally"
            )
            # A Hub ID has the form owner/name, so a single word may be a misspelled `embedded`.
            if difflib.get_close_matches(model, [NAME]):
                hint = f"did you mean {NAME}? Otherwise, {hint}"
        # The class of the error in diffusers: scripts catch it to download the model or to load another variant.
        kind = ModelFileError if isinstance(error, OSError) else ModelError
        raise kind(f"cannot load {model}: {message}", hint=hint) from error


_DOWNLOAD_HINTS = {
    "connection": "check the network connection, then load the model again: complete files are not downloaded again",
    "disk": "free disk space, or set HF_HOME to a folder on a larger disk",
    "gated": "accept the conditions of the repository on its page on the Hub, then run `hf auth login`",
}


def _make_download_error(failed: FailedDownload, error: Exception) -> ModelFileError:
    return ModelFileError(
        f"cannot download {failed.file} of {failed.repository}: {first_line(error)}",
        hint=_DOWNLOAD_HINTS[failed.reason],
    )
