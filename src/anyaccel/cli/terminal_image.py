"""Showing a picture in the terminal: by the protocol that the terminal knows, or as blocks of colour."""

from __future__ import annotations

import base64
import io
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from anyaccel.errors import UsageError, nearest

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL import Image

__all__ = [
    "WAYS",
    "ask_for_sixel",
    "check_protocol",
    "choose_protocol",
    "encode_blocks",
    "encode_iterm2",
    "encode_kitty",
    "encode_sixel",
    "show_image",
]

WAYS = ("auto", "kitty", "iterm2", "sixel", "blocks", "never")
_CHUNK = 4096
"""As much as the kitty protocol takes at a time."""
_COLUMNS, _ROWS = 64, 32
_NARROWEST = 8
_SIXEL_PIXELS = 384
_QUERY_TIMEOUT_S = 0.2
_KITTY = ("kitty", "ghostty", "wezterm", "konsole")
_ITERM2 = ("iterm.app", "iterm2", "mintty")
_STRETCHED = (0, 95, 135, 175, 215, 255)
"""The levels of red, green and blue in a palette of 256 colours."""


def check_protocol(way: str) -> None:
    """Raise if there is no such way to show a picture."""
    if way not in WAYS:
        raise UsageError(f"a picture cannot be shown by {way!r}", hint=nearest(way, WAYS))


def show_image(image: Image.Image, stream: TextIO, way: str = "auto") -> None:
    """Show a picture on a terminal; on anything else, or where the terminal can show none, do nothing."""
    if not stream.isatty():
        return
    chosen = choose_protocol(os.environ, ask_for_sixel, stream.encoding or "ascii") if way == "auto" else way
    size = os.get_terminal_size(stream.fileno())
    columns, lines = size.columns or 80, size.lines or 24  # some say 0, and mean that they do not know
    if chosen == "never" or columns < _NARROWEST:
        return
    columns, rows = min(columns, _COLUMNS), max(4, min(lines - 3, _ROWS))
    if chosen == "kitty":
        text = encode_kitty(_as_png(image), min(rows, columns // 2))
    elif chosen == "iterm2":
        text = encode_iterm2(_as_png(image), min(rows, columns // 2))
    elif chosen == "sixel":
        text = encode_sixel(_enlarge(image))
    else:
        text = encode_blocks(image, columns, rows, all_colours=_has_all_colours(os.environ))
    stream.write(text + "\n")
    stream.flush()


def choose_protocol(environment: Mapping[str, str], knows_sixel: Callable[[], bool], encoding: str) -> str:
    """How a terminal shows pictures, by what it says of itself; it is asked about sixel only if that leaves it open."""
    terminal = environment.get("TERM", "")
    if environment.get("NO_COLOR") or terminal in ("", "dumb", "linux"):
        return "never"
    program = (environment.get("LC_TERMINAL") or environment.get("TERM_PROGRAM") or "").lower()
    multiplexed = bool(environment.get("TMUX") or environment.get("STY") or terminal.startswith(("screen", "tmux")))
    if not multiplexed:  # a multiplexer passes no pictures on
        if environment.get("KITTY_WINDOW_ID") or environment.get("KONSOLE_VERSION") or program in _KITTY:
            return "kitty"
        if any(name in terminal for name in _KITTY):
            return "kitty"
        if program in _ITERM2:
            return "iterm2"
        if knows_sixel():
            return "sixel"
    try:
        "▀".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return "never"
    return "blocks"


def _has_all_colours(environment: Mapping[str, str]) -> bool:
    direct = environment.get("TERM", "").endswith(("-direct", "-truecolor"))
    return direct or environment.get("COLORTERM", "").lower() in ("truecolor", "24bit")


def ask_for_sixel() -> bool:
    """Ask the terminal what it can do, and wait a moment for the answer; a terminal that knows sixel says 4."""
    if os.name != "posix" or sys.stdin is None or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    import termios
    import tty

    source, target = sys.stdin.fileno(), sys.stdout.fileno()
    if os.tcgetpgrp(source) != os.getpgrp():  # in the background a process that reads is stopped
        return False
    before = termios.tcgetattr(source)
    try:
        tty.setcbreak(source, termios.TCSANOW)
        os.write(target, b"\x1b[c")
        answer = _read_answer(source)
    finally:
        termios.tcsetattr(source, termios.TCSAFLUSH, before)
    _, found, features = answer.partition(b"\x1b[?")
    return bool(found) and b"4" in features.rstrip(b"c").split(b";")[1:]


def _read_answer(source: int) -> bytes:
    answer, end = b"", time.monotonic() + _QUERY_TIMEOUT_S
    while not answer.endswith(b"c"):
        left = end - time.monotonic()
        if left <= 0 or not select.select([source], [], [], left)[0]:
            break
        answer += os.read(source, 64)
    return answer


def encode_kitty(png: bytes, rows: int) -> str:
    """A picture in kitty's protocol, so many lines high; the terminal is told not to answer."""
    data = base64.b64encode(png).decode("ascii")
    parts = [data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK)]
    text = []
    for place, part in enumerate(parts):
        more = int(place < len(parts) - 1)
        keys = f"f=100,a=T,r={rows},q=2,m={more}" if place == 0 else f"m={more}"
        text.append(f"\x1b_G{keys};{part}\x1b\\")
    return "".join(text)


def encode_iterm2(png: bytes, rows: int) -> str:
    """A picture in iTerm2's protocol, so many lines high."""
    data = base64.b64encode(png).decode("ascii")
    return f"\x1b]1337;File=inline=1;size={len(png)};height={rows};preserveAspectRatio=1:{data}\x07"


def encode_sixel(image: Image.Image) -> str:
    """A picture as sixels: a palette, then bands of six lines, one colour after the other."""
    import numpy as np

    indexed = image.convert("RGB").quantize(256)
    colours = np.asarray(indexed.getpalette()).reshape(-1, 3)
    pixels = np.asarray(indexed)
    text = [f'\x1bPq"1;1;{image.width};{image.height}']
    for colour in np.unique(pixels):
        red, green, blue = (round(int(level) * 100 / 255) for level in colours[colour])
        text.append(f"#{colour};2;{red};{green};{blue}")
    for top in range(0, image.height, 6):
        text.append("$".join(_encode_band(pixels[top : top + 6])) + "-")
    return "".join(text) + "\x1b\\"


def _encode_band(band: npt.NDArray[np.uint8]) -> Iterator[str]:
    """Up to six lines: for each colour in them, which of the six a column has, runs being counted."""
    import numpy as np

    weights = (1 << np.arange(len(band)))[:, None]
    for colour in np.unique(band):
        bits = ((band == colour) * weights).sum(axis=0)
        starts = np.flatnonzero(np.diff(bits, prepend=-1))
        lengths = np.diff(starts, append=len(bits))
        runs = [(int(length), chr(63 + int(bits[start]))) for start, length in zip(starts, lengths, strict=True)]
        yield f"#{colour}" + "".join(f"!{length}{sixel}" if length > 3 else sixel * length for length, sixel in runs)


def encode_blocks(image: Image.Image, columns: int, rows: int, *, all_colours: bool) -> str:
    """A picture as half blocks, each showing two pixels: the upper as its colour, the lower as its background."""
    import numpy as np

    scale = min(columns / image.width, 2 * rows / image.height)
    width, height = max(1, round(image.width * scale)), max(2, 2 * round(image.height * scale / 2))
    pixels = np.asarray(image.convert("RGB").resize((width, height)))
    name = _colour_of_all if all_colours else _colour_of_256
    lines = []
    for upper, lower in zip(pixels[0::2], pixels[1::2], strict=True):
        cells = [f"\x1b[38;{name(top)};48;{name(bottom)}m▀" for top, bottom in zip(upper, lower, strict=True)]
        lines.append("".join(cells) + "\x1b[0m")
    return "\n".join(lines)


def _colour_of_all(pixel: Any) -> str:
    red, green, blue = (int(level) for level in pixel)
    return f"2;{red};{green};{blue}"


def _colour_of_256(pixel: Any) -> str:
    red, green, blue = (min(range(6), key=lambda step: abs(_STRETCHED[step] - int(level))) for level in pixel)
    return f"5;{16 + 36 * red + 6 * green + blue}"


def _as_png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.convert("RGB").save(stream, "PNG")
    return stream.getvalue()


def _enlarge(image: Image.Image) -> Image.Image:
    """A size that can be seen: small pictures by a whole number, large ones made to fit."""
    longer = max(image.size)
    if longer > _SIXEL_PIXELS:
        share = _SIXEL_PIXELS / longer
        return image.resize((max(1, round(image.width * share)), max(1, round(image.height * share))))
    factor = _SIXEL_PIXELS // longer
    return image.resize((image.width * factor, image.height * factor), resample=0)
