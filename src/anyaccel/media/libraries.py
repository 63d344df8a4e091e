"""Checks that the libraries for video and audio files are installed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Literal

from anyaccel.errors import MissingLibraryError

__all__ = ["Extra", "find_encoder", "is_installed", "require_extra"]

Extra = Literal["video", "audio"]

# The library of each extra: its name and its module.
_LIBRARIES: dict[Extra, tuple[str, str]] = {"video": ("PyAV", "av"), "audio": ("soundfile", "soundfile")}


def is_installed(extra: Extra) -> bool:
    """Return whether the library of an extra is installed, without importing it."""
    return importlib.util.find_spec(_LIBRARIES[extra][1]) is not None


def require_extra(extra: Extra, use: str) -> None:
    """Import the library of an extra; raise `MissingLibraryError` if this is not possible.

    `use` is the subject of the error message, such as `MP4 files`.
    """
    title, module = _LIBRARIES[extra]
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:  # soundfile raises an OSError if libsndfile is missing
        reason = "is not installed" if not is_installed(extra) else f"cannot be imported: {error}"
        raise MissingLibraryError(
            f"{use} require {title}, which {reason}", hint=f"pip install 'anyaccel[{extra}]'"
        ) from error


def find_encoder(names: tuple[str, ...], use: str) -> str:
    """Return the first of the named encoders that PyAV contains; raise `MissingLibraryError` if it has none."""
    require_extra("video", use)
    import av

    for name in names:
        try:
            av.codec.Codec(name, "w")
        except ValueError:  # PyAV raises UnknownCodecError, a ValueError
            continue
        return name
    raise MissingLibraryError(
        f"{use} require the encoder {' or '.join(names)}, which the installed PyAV {av.__version__} does not contain",
        hint="install the PyAV wheel, which contains it: pip install --force-reinstall --only-binary av "
        "'anyaccel[video]'",
    )
