"""What torch calls when it is imported: with `ANYACCEL_VIRTUAL` set, any program gets a virtual accelerator.

Without the variable nothing but the standard library is loaded. An error here would make `import torch` fail with a
page of traceback, so that it is one line of ours instead.
"""

from __future__ import annotations

import os
import sys

__all__ = ["VARIABLE", "autoload"]

VARIABLE = "ANYACCEL_VIRTUAL"
LEDGER_VARIABLE = "ANYACCEL_VIRTUAL_LEDGER"


def autoload() -> None:
    """Start the virtual accelerator that the environment asks for, if it asks for one."""
    request = os.environ.get(VARIABLE)
    if not request:
        return
    from anyaccel.errors import AnyaccelError, RealDeviceError

    try:
        _start(request)
    except RealDeviceError as error:
        sys.stderr.write(f"anyaccel: the real device is used: {error.message}\n")
    except AnyaccelError as error:
        sys.stderr.write(f"anyaccel: {error.message}; hint: {error.hint}\n")
        sys.stderr.flush()
        raise SystemExit(error.exit_status) from None


def _start(request: str) -> None:
    import atexit

    from anyaccel.backends.device_spec import VIRTUAL_PREFIX, DeviceSpec
    from anyaccel.backends.registry import load_registry
    from anyaccel.emulator.activation import start
    from anyaccel.errors import UsageError

    spec = DeviceSpec.parse(VIRTUAL_PREFIX + request, load_registry(), f" (from {VARIABLE})")
    if spec.index is not None:
        raise UsageError(
            f"{VARIABLE}={request!r} names a device by its index, and the variable starts all of them",
            hint=f"write {VARIABLE}={spec.name},count={spec.index or 2}; elsewhere, {spec.count_hint()}",
        )
    path = _find_ledger_path()
    accelerator = start(spec.name, spec.count or 1, spec.product or spec.memory, spec.strict)
    if path:
        atexit.register(accelerator.ledger.write, path)


def _find_ledger_path() -> str:
    """Where the ledger goes, wherever the program goes; what the program starts writes beside it, by its number."""
    named = os.environ.get(LEDGER_VARIABLE, "")
    if not named:
        return ""
    from anyaccel.errors import UsageError

    path = os.path.abspath(named)
    if os.path.isdir(path) or not os.path.isdir(os.path.dirname(path)):
        raise UsageError(f"{LEDGER_VARIABLE}={named!r} is no file that can be written", hint="name a file in a folder")
    owner = os.environ.setdefault(f"{LEDGER_VARIABLE}_OWNER", str(os.getpid()))
    stem, ending = os.path.splitext(path)
    return path if owner == str(os.getpid()) else f"{stem}.{os.getpid()}{ending}"
