"""Running the command line on a terminal: a pseudo-terminal of a forked process, so that nothing is imported anew."""

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
_QUESTION = b"\x1b[c"


@dataclass(frozen=True)
class Screen:
    """What was written to a terminal, and how the process ended."""

    output: bytes
    status: int

    @property
    def text(self) -> str:
        """The same without colours and moves of the cursor."""
        return _ESCAPES.sub(b"", self.output).decode(errors="replace")


def run_on_terminal(
    arguments: Sequence[str],
    *,
    environment: dict[str, str] | None = None,
    columns: int = 80,
    lines: int = 40,
    answer: bytes = b"",
    press: tuple[bytes, bytes] | None = None,
    timeout_s: float = 300.0,
) -> Screen:
    """Run `anyaccel` with these arguments; `answer` is the terminal's to a question about itself.

    `press` is a text to wait for, and the keys that are pressed then.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, of which none is torch's
        process, terminal = pty.fork()
    if process == 0:
        while not os.get_terminal_size(0).columns:  # until the other side has set it
            time.sleep(0.005)
        run_command(arguments, environment or {})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    output, end = b"", time.monotonic() + timeout_s
    while time.monotonic() < end:
        if not select.select([terminal], [], [], 0.1)[0]:
            continue
        try:
            part = os.read(terminal, 65536)
        except OSError:  # Linux says so when the other side is closed
            break
        if not part:
            break
        output += part
        if answer and _QUESTION in part:
            os.write(terminal, answer)
        if press and press[0] in output:
            os.write(terminal, press[1])
            press = None
    os.close(terminal)
    return Screen(output, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))


def run_command(arguments: Sequence[str], environment: dict[str, str]) -> NoReturn:
    """What a forked process does: its streams are those of its own, and nothing of pytest's is run at its end."""
    status = 3
    try:
        for name in ("NO_COLOR", "COLORTERM", "TMUX", "STY", "TERM_PROGRAM", "LC_TERMINAL", "KITTY_WINDOW_ID"):
            os.environ.pop(name, None)
        os.environ.update({"TERM": "xterm-256color"} | environment)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        sys.argv = ["anyaccel", *arguments]
        warnings.resetwarnings()
        main()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 3
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
