"""Entry point for torch's device autoloading; `ANYACCEL_VIRTUAL` starts a virtual accelerator.

Torch calls it at import (https://docs.pytorch.org/docs/stable/accelerator/autoload.html). If the
variable is not set, only standard library modules are imported. Errors are printed on one line,
because an exception would make `import torch` fail with a long traceback.
"""

from __future__ import annotations

import os
import sys

__all__ = ["VARIABLE", "autoload"]

VARIABLE = "ANYACCEL_VIRTUAL"
LEDGER_VARIABLE = "ANYACCEL_VIRTUAL_LEDGER"


def autoload() -> None:
    """Start the virtual accelerator that `ANYACCEL_VIRTUAL` names, if the variable is set."""
    request = os.environ.get(VARIABLE)
    if not request:
        return
    from anyaccel.errors import AnyaccelError, RealDeviceError  # here: every `import torch` runs this file

    try:
        _start(request)
    except RealDeviceError as error:
        sys.stderr.write(f"anyaccel: using the real device: {error.message}\n")
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
        count = spec.index or 2
        raise UsageError(
            f"{VARIABLE}={request!r} includes a device index, but the variable accepts only a device count",
            hint=f"set {VARIABLE}={spec.name},count={count} to create {count} devices, "
            f"then select the last one with {spec.name}:{count - 1}",
        )
    path = _find_ledger_path()
    accelerator = start(spec.name, spec.count or 1, spec.product or spec.memory, spec.strict)
    if path:
        atexit.register(accelerator.ledger.write, path)


def _find_ledger_path() -> str:
    """Return the absolute path of the ledger file, or an empty string if none is configured.

    In a child process, the file name includes the process ID.
    """
    value = os.environ.get(LEDGER_VARIABLE, "")
    if not value:
        return ""
    from anyaccel.errors import UsageError

    path = os.path.abspath(value)  # now, because the program may change its working directory
    if os.path.isdir(path) or not os.path.isdir(os.path.dirname(path)):
        reason = "is a folder" if os.path.isdir(path) else "is in a folder that does not exist"
        raise UsageError(
            f"{LEDGER_VARIABLE}={value!r} {reason}", hint=f"use a file name, for example {LEDGER_VARIABLE}=ledger.json"
        )
    # Children inherit the environment: the first process that sets the owner gets the plain file name.
    owner = os.environ.setdefault(f"{LEDGER_VARIABLE}_OWNER", str(os.getpid()))
    stem, ending = os.path.splitext(path)
    return path if owner == str(os.getpid()) else f"{stem}.{os.getpid()}{ending}"
