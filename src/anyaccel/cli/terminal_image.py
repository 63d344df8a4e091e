"""Image display in the terminal, using a graphics protocol or colored half-block characters."""

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
    "PROTOCOLS",
    "check_protocol",
    "choose_protocol",
    "encode_blocks",
    "encode_iterm2",
    "encode_kitty",
    "encode_sixel",
    "query_sixel",
    "show_image",
]

# Values of `--show`.
PROTOCOLS = ("auto", "kitty", "iterm2", "sixel", "blocks", "never")
# Maximum payload in bytes of one kitty escape sequence (https://sw.kovidgoyal.net/kitty/graphics-protocol/).
_CHUNK = 4096
_MAX_COLUMNS, _MAX_ROWS = 64, 32
_MIN_COLUMNS = 8
_SIXEL_PIXELS = 384
_QUERY_TIMEOUT_S = 0.2
_KITTY = ("kitty", "ghostty", "wezterm", "konsole")
_ITERM2 = ("iterm.app", "iterm2", "mintty")
# Levels of red, green and blue in the 6x6x6 cube of the 256-color palette.
_CUBE_LEVELS = (0, 95, 135, 175, 215, 255)


def check_protocol(protocol: str) -> None:
    """Raise if the protocol is not a valid value for `--show`."""
    if protocol not in PROTOCOLS:
        raise UsageError(f"unknown value {protocol!r} for --show", hint=nearest(protocol, PROTOCOLS))


def show_image(image: Image.Image, stream: TextIO, protocol: str = "auto") -> None:
    """Show an image if the stream is a terminal that can display images."""
    if not stream.isatty():
        return
    if protocol == "auto":
        protocol = choose_protocol(os.environ, query_sixel, stream.encoding or "ascii")
    size = os.get_terminal_size(stream.fileno())
    columns, lines = size.columns or 80, size.lines or 24  # serial consoles and some containers report 0
    if protocol == "never" or columns < _MIN_COLUMNS:
        return
    columns, rows = min(columns, _MAX_COLUMNS), max(4, min(lines - 3, _MAX_ROWS))
    # A character cell is about twice as high as it is wide, so a square image of n rows takes 2n columns.
    if protocol == "kitty":
        text = encode_kitty(_encode_png(image), min(rows, columns // 2))
    elif protocol == "iterm2":
        text = encode_iterm2(_encode_png(image), min(rows, columns // 2))
    elif protocol == "sixel":
        text = encode_sixel(_scale_for_sixel(image))
    else:
        text = encode_blocks(image, columns, rows, true_color=_has_true_color(os.environ))
    stream.write(text + "\n")
    stream.flush()


def choose_protocol(environment: Mapping[str, str], supports_sixel: Callable[[], bool], encoding: str) -> str:
    """Return the graphics protocol for a terminal with these environment variables.

    `supports_sixel` queries the terminal; it is called only if the variables are inconclusive.
    """
    terminal = environment.get("TERM", "")
    if environment.get("NO_COLOR") or terminal in ("", "dumb", "linux"):
        return "never"
    program = (environment.get("LC_TERMINAL") or environment.get("TERM_PROGRAM") or "").lower()
    multiplexed = bool(environment.get("TMUX") or environment.get("STY") or terminal.startswith(("screen", "tmux")))
    # tmux and screen do not pass graphics through by default, whatever the outer terminal supports.
    if not multiplexed:
        if environment.get("KITTY_WINDOW_ID") or environment.get("KONSOLE_VERSION") or program in _KITTY:
            return "kitty"
        if any(name in terminal for name in _KITTY):
            return "kitty"
        if program in _ITERM2:
            return "iterm2"
        if supports_sixel():
            return "sixel"
    try:
        "▀".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return "never"
    return "blocks"


def _has_true_color(environment: Mapping[str, str]) -> bool:
    direct = environment.get("TERM", "").endswith(("-direct", "-truecolor"))
    return direct or environment.get("COLORTERM", "").lower() in ("truecolor", "24bit")


def query_sixel() -> bool:
    """Return whether the terminal reports sixel support.

    The query is the Primary Device Attributes sequence; terminals with sixel report attribute 4.
    """
    if os.name != "posix" or sys.stdin is None or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    import termios
    import tty

    source, target = sys.stdin.fileno(), sys.stdout.fileno()
    if os.tcgetpgrp(source) != os.getpgrp():  # reading the terminal would stop a background process (SIGTTIN)
        return False
    saved_attributes = termios.tcgetattr(source)
    try:
        # In cooked mode the reply would be echoed, and would arrive only after Enter.
        tty.setcbreak(source, termios.TCSANOW)
        os.write(target, b"\x1b[c")
        reply = _read_reply(source)
    finally:
        # TCSAFLUSH drops a late reply, which the shell would otherwise read as typed text.
        termios.tcsetattr(source, termios.TCSAFLUSH, saved_attributes)
    _, start, attributes = reply.partition(b"\x1b[?")
    return bool(start) and b"4" in attributes.rstrip(b"c").split(b";")[1:]


def _read_reply(source: int) -> bytes:
    reply, deadline = b"", time.monotonic() + _QUERY_TIMEOUT_S
    while not reply.endswith(b"c"):
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0 or not select.select([source], [], [], remaining_s)[0]:
            break
        reply += os.read(source, 64)
    return reply


def encode_kitty(png: bytes, rows: int) -> str:
    """Encode a PNG as escape sequences for the kitty graphics protocol, `rows` text lines high."""
    data = base64.b64encode(png).decode("ascii")
    chunks = [data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK)]
    sequences = []
    for index, chunk in enumerate(chunks):
        more = int(index < len(chunks) - 1)
        # q=2 suppresses the replies of the terminal, which the shell would read as typed text.
        keys = f"f=100,a=T,r={rows},q=2,m={more}" if index == 0 else f"m={more}"
        sequences.append(f"\x1b_G{keys};{chunk}\x1b\\")
    return "".join(sequences)


def encode_iterm2(png: bytes, rows: int) -> str:
    """Encode a PNG as an escape sequence for the iTerm2 image protocol, `rows` text lines high."""
    data = base64.b64encode(png).decode("ascii")
    return f"\x1b]1337;File=inline=1;size={len(png)};height={rows};preserveAspectRatio=1:{data}\x07"


def encode_sixel(image: Image.Image) -> str:
    """Encode an image as sixels: a palette, then bands of six pixel rows, each encoded color by color."""
    import numpy as np

    indexed = image.convert("RGB").quantize(256)
    palette = np.asarray(indexed.getpalette()).reshape(-1, 3)
    pixels = np.asarray(indexed)
    text = [f'\x1bPq"1;1;{image.width};{image.height}']
    for color in np.unique(pixels):
        red, green, blue = (round(int(level) * 100 / 255) for level in palette[color])  # sixel levels are percentages
        text.append(f"#{color};2;{red};{green};{blue}")
    for top in range(0, image.height, 6):
        text.append("$".join(_encode_band(pixels[top : top + 6])) + "-")
    return "".join(text) + "\x1b\\"


def _encode_band(band: npt.NDArray[np.uint8]) -> Iterator[str]:
    """Yield the run-length-encoded sixels for each color in a band of up to six pixel rows."""
    import numpy as np

    weights = (1 << np.arange(len(band)))[:, None]
    for color in np.unique(band):
        # Each column is one character: bit i is set if line i has the color, offset by "?" (63).
        bits = ((band == color) * weights).sum(axis=0)
        starts = np.flatnonzero(np.diff(bits, prepend=-1))
        lengths = np.diff(starts, append=len(bits))
        runs = [(int(length), chr(63 + int(bits[start]))) for start, length in zip(starts, lengths, strict=True)]
        yield f"#{color}" + "".join(f"!{length}{sixel}" if length > 3 else sixel * length for length, sixel in runs)


def encode_blocks(image: Image.Image, columns: int, rows: int, *, true_color: bool) -> str:
    """Encode an image as half-block characters, each of which shows two pixels.

    The upper pixel sets the foreground color, and the lower pixel sets the background color.
    """
    import numpy as np

    scale = min(columns / image.width, 2 * rows / image.height)
    width, height = max(1, round(image.width * scale)), max(2, 2 * round(image.height * scale / 2))
    pixels = np.asarray(image.convert("RGB").resize((width, height)))
    color = _format_true_color if true_color else _format_palette_color
    lines = []
    for upper, lower in zip(pixels[0::2], pixels[1::2], strict=True):
        cells = [f"\x1b[38;{color(top)};48;{color(bottom)}m▀" for top, bottom in zip(upper, lower, strict=True)]
        lines.append("".join(cells) + "\x1b[0m")
    return "\n".join(lines)


def _format_true_color(pixel: Any) -> str:
    red, green, blue = (int(level) for level in pixel)
    return f"2;{red};{green};{blue}"


def _format_palette_color(pixel: Any) -> str:
    red, green, blue = (min(range(6), key=lambda step: abs(_CUBE_LEVELS[step] - int(level))) for level in pixel)
    return f"5;{16 + 36 * red + 6 * green + blue}"


def _encode_png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.convert("RGB").save(stream, "PNG")
    return stream.getvalue()


def _scale_for_sixel(image: Image.Image) -> Image.Image:
    """Scale an image for display: small images up by an integer factor, large images down to fit."""
    longer = max(image.size)
    if longer > _SIXEL_PIXELS:
        scale = _SIXEL_PIXELS / longer
        return image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
    factor = _SIXEL_PIXELS // longer
    return image.resize((image.width * factor, image.height * factor), resample=0)
