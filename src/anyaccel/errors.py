"""Every error that anyaccel raises on purpose, in one tree.

    AnyaccelError                 exit status 3: something broke
    ├── UsageError                exit status 2: the call was wrong (also a ValueError)
    │   ├── UnknownDeviceError    no backend has that name
    │   ├── UnknownDtypeError     torch has no such number type
    │   ├── UnknownProductError   no sheet lists that product
    │   ├── UnknownComponentError the pipeline has no component of that name
    │   └── ModelError            what was named is no model, or one that is broken or not trusted
    ├── DeviceUnavailableError    exit status 1: the device is known, and not here (also a RuntimeError)
    ├── LimitError                exit status 1: a virtual device refuses what the real one cannot do (a RuntimeError)
    │   └── LimitTypeError        the same where the real device raises a TypeError
    ├── VirtualDeviceError        a virtual device cannot be had here, or not beside another
    │   └── RealDeviceError       the real one is here, and wins
    ├── DoesNotFitError           exit status 1: more memory is needed than there is (also a RuntimeError)
    ├── NotFiniteError            exit status 1: the picture is not finite, in float32 neither (also an ArithmeticError)
    ├── NotMeasurableError        exit status 1: this device keeps no such figure (also a RuntimeError)
    ├── ProcessDiedError          a child process ended before it answered (also a RuntimeError)
    ├── UnmappedError             exit status 1: a script asks for what CUDA alone has (also an AttributeError)
    ├── UpstreamError             torch or a library lacks what anyaccel relies on (also a RuntimeError)
    └── PluginError               a backend plugin is broken, or two claim one name

A message says the limit and what was asked; `hint` says a way out and is printed on a line of its own.
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
    "ModelError",
    "NotFiniteError",
    "NotMeasurableError",
    "PluginError",
    "ProcessDiedError",
    "RealDeviceError",
    "UnknownComponentError",
    "UnknownDeviceError",
    "UnknownDtypeError",
    "UnknownProductError",
    "UnmappedError",
    "UpstreamError",
    "UsageError",
    "VirtualDeviceError",
    "first_line",
    "nearest",
    "summarize_error",
]


class AnyaccelError(Exception):
    """The root of the tree; catch this to catch everything that anyaccel raises on purpose."""

    exit_status: ClassVar[int] = 3

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}"

    def __reduce__(self) -> tuple[object, ...]:
        # The default passes `args` by position, and `hint` is a keyword: errors must cross processes.
        return _rebuild, (type(self), self.message, self.hint)


def _rebuild(kind: type[AnyaccelError], message: str, hint: str) -> AnyaccelError:
    return kind(message, hint=hint)


class UsageError(AnyaccelError, ValueError):
    """The call was wrong, and no device could have answered it."""

    exit_status = 2


class UnknownDeviceError(UsageError):
    """No backend has that name."""


class UnknownDtypeError(UsageError):
    """torch has no such number type."""


class UnknownProductError(UsageError):
    """No sheet lists that product."""


class UnknownComponentError(UsageError):
    """The pipeline has no component of that name."""


class ModelError(UsageError):
    """What was named is no model, or one that is broken or not trusted."""


class DeviceUnavailableError(AnyaccelError, RuntimeError):
    """The device is known, and this machine does not have it."""

    exit_status = 1


class LimitError(AnyaccelError, RuntimeError):
    """A virtual device in strict mode refuses what the real one cannot do."""

    exit_status = 1


class LimitTypeError(LimitError, TypeError):
    """The same, where the real device raises a TypeError."""


class VirtualDeviceError(AnyaccelError, RuntimeError):
    """A virtual device cannot be had in this process."""


class RealDeviceError(VirtualDeviceError):
    """The real device, or its software, is here, and wins over a virtual one."""


class DoesNotFitError(AnyaccelError, RuntimeError):
    """A call needs more memory than the device has, in whatever way it is run."""

    exit_status = 1


class NotFiniteError(AnyaccelError, ArithmeticError):
    """The picture is not finite, and is not in float32 either."""

    exit_status = 1


class NotMeasurableError(AnyaccelError, RuntimeError):
    """The device keeps no such figure, so that none is made up."""

    exit_status = 1


class ProcessDiedError(AnyaccelError, RuntimeError):
    """A child process ended before it answered."""


class UnmappedError(AnyaccelError, AttributeError):
    """A script that was written for CUDA asks for what no other device has; `hasattr` is answered with no."""

    exit_status = 1


class UpstreamError(AnyaccelError, RuntimeError):
    """The installed torch, or another library, lacks an attribute that anyaccel relies on."""


class PluginError(AnyaccelError):
    """A backend plugin could not be imported, or two claim one name."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the name of its class if the message is empty.

    A line that ends with a colon, as torch's "backend='inductor' raised:" does, is joined with the next.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def summarize_error(error: BaseException) -> str:
    """Return the class of an error and the first line of its message: `KeyError: 'a'`."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


_MOST_NAMES, _TOLD_NAMES = 60, 12


def nearest(asked: str, known: Iterable[str], also: Iterable[str] = ()) -> str:
    """Say which known names there are, the nearest one first: `did you mean mps? known: cpu, cuda, …`.

    Of very many, those that are most like what was asked for are told, and how many there are. Names in `also` are
    suggested if they are similar, and not listed.
    """
    names = list(known)
    close = difflib.get_close_matches(asked.lower(), [*names, *also], n=1, cutoff=0.5)
    guess = f"did you mean {close[0]}? " if close else ""
    if len(names) <= _MOST_NAMES:
        return f"{guess}known: {', '.join(names)}"
    alike = difflib.get_close_matches(asked.lower(), names, n=_TOLD_NAMES, cutoff=0.0)
    return f"{guess}known: {', '.join(alike)} and {len(names) - len(alike)} more"
