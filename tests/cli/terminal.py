"""Run the command line on a pseudo-terminal, in a fork of this process to avoid repeated imports."""

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from anyaccel.cli.main import main

__all__ = ["Screen", "run_command", "run_on_terminal"]

_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_ATTRIBUTES_QUERY = b"\x1b[c"


@dataclass(frozen=True)
class Screen:
    """Output on the terminal and exit status of the process."""

    output: bytes
    status: int

    @property
    def text(self) -> str:
        """Output without colors and cursor movements."""
        return _ESCAPES.sub(b"", self.output).decode(errors="replace")


def run_on_terminal(
    arguments: Sequence[str],
    *,
    environment: dict[str, str] | None = None,
    columns: int = 80,
    lines: int = 40,
    reply: bytes = b"",
    press: tuple[bytes, bytes] | None = None,
    timeout_s: float = 300.0,
) -> Screen:
    """Run `anyaccel` with these arguments.

    `reply` is the reply to a device attributes query. `press` is a text to wait for and the keys to press after it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads; none of them is torch's
        process, terminal = pty.fork()
    if process == 0:
        while not os.get_terminal_size(0).columns:  # the parent sets the size after the fork
            time.sleep(0.005)
        run_command(arguments, environment or {})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    output, deadline = b"", time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 0.1)[0]:
            continue
        try:
            data = os.read(terminal, 65536)
        except OSError:  # Linux raises EIO once the child has closed its end
            break
        if not data:
            break
        output += data
        if reply and _ATTRIBUTES_QUERY in data:
            os.write(terminal, reply)
        if press and press[0] in output:
            os.write(terminal, press[1])
            press = None
    os.close(terminal)
    return Screen(output, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))


def run_command(arguments: Sequence[str], environment: dict[str, str]) -> NoReturn:
    """Run a command in a forked process with its own streams, and exit without pytest's cleanup."""
    status = 3
    try:
        # COLUMNS overrides the size of the terminal.
        inherited = ("NO_COLOR", "COLORTERM", "TMUX", "STY", "TERM_PROGRAM", "LC_TERMINAL", "KITTY_WINDOW_ID")
        for name in (*inherited, "COLUMNS", "LINES"):
            os.environ.pop(name, None)
        os.environ.update({"TERM": "xterm-256color"} | environment)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        sys.argv = ["anyaccel", *arguments]
        warnings.resetwarnings()
        main()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 3
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
