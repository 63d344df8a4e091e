"""Where the command begins: before anything is imported, so that Ctrl-C is heard from the first moment on."""

from __future__ import annotations

import sys
from typing import NoReturn

__all__ = ["main"]

_INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line."""
    try:
        from anyaccel.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(_INTERRUPTED)
