"""Entry point for the `anyaccel` command."""

from __future__ import annotations

import sys
from typing import NoReturn

__all__ = ["main"]

_INTERRUPTED = 130


def main() -> NoReturn:
    """Run the `anyaccel` command; after Ctrl-C, print `interrupted` and exit with status 130."""
    try:
        # Imported in the try block: Ctrl-C during the imports must not print a traceback.
        from anyaccel.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(_INTERRUPTED)
