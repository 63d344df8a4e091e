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

    from anyaccel.emulator.activation import parse_request, start

    name, count, memory, strict = parse_request(request)
    accelerator = start(name, count=count, memory=memory, strict=strict)
    path = os.environ.get(LEDGER_VARIABLE)
    if path:
        atexit.register(accelerator.ledger.write, path)
