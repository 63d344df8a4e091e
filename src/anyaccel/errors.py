"""Exceptions raised by anyaccel.

    AnyaccelError                 exit status 3: unexpected failure
    ├── UsageError                exit status 2: invalid arguments (also a ValueError)
    │   ├── UnknownDeviceError    unknown device name
    │   ├── UnknownDtypeError     unknown torch dtype
    │   ├── UnknownProductError   product not listed on the sheet
    │   ├── UnknownComponentError unknown component of the pipeline
    │   ├── UnknownLoraError      LoRA that a service does not have
    │   └── ModelError            not a model, or a broken or untrusted one
    │       ├── ModelFileError    files of a model are missing or damaged (also an OSError, as in diffusers)
    │       └── MissingLibraryError a library for the model or file format is not installed (also an ImportError)
    ├── DeviceUnavailableError    exit status 1: known device, not available (also a RuntimeError)
    ├── LimitError                exit status 1: a virtual device hit a limit of the real one (also a RuntimeError)
    │   └── LimitTypeError        the same, if the real device raises a TypeError
    ├── VirtualDeviceError        a virtual device cannot be started (also a RuntimeError)
    │   └── RealDeviceError       the real device is available and takes precedence
    ├── DoesNotFitError           exit status 1: not enough memory (also a RuntimeError)
    ├── NotFiniteError            exit status 1: NaN or Inf in the image, even in float32 (also an ArithmeticError)
    ├── NotMeasurableError        exit status 1: the device does not report this value (also a RuntimeError)
    ├── ProcessDiedError          a child process exited without a result (also a RuntimeError)
    ├── UnmappedError             exit status 1: a script uses a CUDA-only attribute (also an AttributeError)
    ├── UpstreamError             torch or a library lacks an attribute (also a RuntimeError)
    └── PluginError               broken backend plugin, or two with the same name

Every error has a `message` and a `hint` that says what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar

__all__ = [
    "AnyaccelError",
    "DeviceUnavailableError",
    "DoesNotFitError",
    "LimitError",
    "LimitTypeError",
    "MissingLibraryError",
    "ModelError",
    "ModelFileError",
    "NotFiniteError",
    "NotMeasurableError",
    "PluginError",
    "ProcessDiedError",
    "RealDeviceError",
    "UnknownComponentError",
    "UnknownDeviceError",
    "UnknownDtypeError",
    "UnknownLoraError",
    "UnknownProductError",
    "UnmappedError",
    "UpstreamError",
    "UsageError",
    "VirtualDeviceError",
    "find_similar",
    "first_line",
    "nearest",
    "summarize_error",
]


class AnyaccelError(Exception):
    """Base class for all exceptions that anyaccel raises deliberately."""

    exit_status: ClassVar[int] = 3

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message, hint)  # both in args, so repr() and logs show the hint
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}"

    def __reduce__(self) -> tuple[object, ...]:
        # Errors are pickled between processes. The default passes `args` by position, but `hint` is keyword-only.
        return _rebuild, (type(self), self.message, self.hint)


def _rebuild(kind: type[AnyaccelError], message: str, hint: str) -> AnyaccelError:
    return kind(message, hint=hint)


# Subclasses also derive from a built-in exception, so callers can catch them without importing anyaccel.
class UsageError(AnyaccelError, ValueError):
    """Arguments that are invalid on every device."""

    exit_status = 2


class UnknownDeviceError(UsageError):
    """Unknown device name."""


class UnknownDtypeError(UsageError):
    """Unknown torch dtype."""


class UnknownProductError(UsageError):
    """Product name that is not listed on the device's sheet."""


class UnknownComponentError(UsageError):
    """Unknown pipeline component."""


class UnknownLoraError(UsageError):
    """LoRA that is not in the folder of a service."""


class ModelError(UsageError):
    """Model that is invalid, corrupted or untrusted."""


class ModelFileError(ModelError, OSError):
    """Files of a model that are missing or damaged."""


class MissingLibraryError(ModelError, ImportError):
    """Model or file format that requires a library that is not installed."""


class DeviceUnavailableError(AnyaccelError, RuntimeError):
    """Known device that is not available on this machine."""

    exit_status = 1


class LimitError(AnyaccelError, RuntimeError):
    """A virtual device in strict mode hit a limit of the real device."""

    exit_status = 1


# Code that catches the TypeError of the real device must also work on a virtual one.
class LimitTypeError(LimitError, TypeError):
    """A `LimitError` for operations that raise a TypeError on the real device."""


class VirtualDeviceError(AnyaccelError, RuntimeError):
    """A virtual device cannot be started in this process."""


class RealDeviceError(VirtualDeviceError):
    """The real device or its software is available and takes precedence over a virtual one."""


class DoesNotFitError(AnyaccelError, RuntimeError):
    """A call needs more memory than the device has, in every memory mode."""

    exit_status = 1


class NotFiniteError(AnyaccelError, ArithmeticError):
    """The image contains NaN or Inf, even when recomputed in float32."""

    exit_status = 1


class NotMeasurableError(AnyaccelError, RuntimeError):
    """The device does not report the requested measurement, such as its memory use."""

    exit_status = 1


class ProcessDiedError(AnyaccelError, RuntimeError):
    """A child process exited without a result."""


class UnmappedError(AnyaccelError, AttributeError):
    """A CUDA script uses an attribute that has no equivalent on the device.

    It is also an AttributeError, so `hasattr` returns False.
    """

    exit_status = 1


class UpstreamError(AnyaccelError, RuntimeError):
    """The installed torch or another library lacks an attribute that anyaccel needs."""


class PluginError(AnyaccelError):
    """A backend plugin failed to load, or two plugins have the same name."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, or the error's class name if the message is empty.

    A line that ends with a colon, such as torch's "backend='inductor' raised:", is joined with the next one.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # Plan reasons and progress lines have no space for tracebacks and multi-line advice.
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def summarize_error(error: BaseException) -> str:
    """Return the class name and the first line of the message, such as `KeyError: 'a'`."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


# More names than this do not fit on a few lines of a terminal.
_MAX_LISTED, _MAX_SIMILAR = 60, 12


def find_similar(name: str, known: Iterable[str]) -> str | None:
    """Return the known name with all words of an unknown one, or the most similar name, or None if there is none."""
    names, words = list(known), set(name.lower().replace("-", "_").split("_"))
    # `num_steps` is spelled more like `timesteps` than like `num_inference_steps`.
    containing = [other for other in names if words <= set(other.replace("-", "_").split("_"))]
    if containing:
        return min(containing, key=len)
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return close[0] if close else None


def nearest(name: str, known: Iterable[str], also: Iterable[str] = ()) -> str:
    """Return a hint for a misspelled name, such as `did you mean mps? known: cpu, cuda, …`.

    A long list is shortened to the most similar names. Names in `also` are suggested but not listed.
    """
    names = list(known)
    similar_name = find_similar(name, [*names, *also])
    guess = f"did you mean {similar_name}? " if similar_name else ""
    # With very many names, such as all recipes, the list would hide the suggestion.
    if len(names) <= _MAX_LISTED:
        return f"{guess}known: {', '.join(names)}"
    similar = difflib.get_close_matches(name.lower(), names, n=_MAX_SIMILAR, cutoff=0.0)
    return f"{guess}known: {', '.join(similar)} and {len(names) - len(similar)} more"
