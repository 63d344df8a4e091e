"""Images in the terminal: encodings, decoded like a terminal does, and the choice of the protocol."""

import base64
import io
import re

import numpy
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from anyaccel.cli.terminal_image import (
    PROTOCOLS,
    check_protocol,
    choose_protocol,
    encode_blocks,
    encode_iterm2,
    encode_kitty,
    encode_sixel,
    query_sixel,
    show_image,
)
from anyaccel.errors import UsageError

Pixels = npt.NDArray[numpy.int_]


def noise(width: int, height: int, colors: int = 200, seed: int = 1) -> Image.Image:
    generator = numpy.random.default_rng(seed)
    palette = generator.integers(0, 256, (colors, 3), dtype=numpy.uint8)
    return Image.fromarray(palette[generator.integers(0, colors, (height, width))])


def test_kitty_splits_a_file_into_chunks() -> None:
    png = bytes(range(256)) * 50
    chunks = re.findall("\x1b_G([^;]*);([^\x1b]*)\x1b\\\\", encode_kitty(png, 20))
    assert base64.b64decode("".join(data for _, data in chunks)) == png
    assert all(len(data) <= 4096 for _, data in chunks)
    assert all(len(data) % 4 == 0 for _, data in chunks)
    first = dict(key.split("=") for key in chunks[0][0].split(","))
    assert first == {"f": "100", "a": "T", "r": "20", "q": "2", "m": "1"}
    assert [keys for keys, _ in chunks[1:]] == ["m=1"] * (len(chunks) - 2) + ["m=0"]


def test_kitty_sends_a_small_file_in_one_chunk() -> None:
    assert encode_kitty(b"png", 2) == "\x1b_Gf=100,a=T,r=2,q=2,m=0;cG5n\x1b\\"


def test_iterm2_sends_the_file_in_one_sequence() -> None:
    assert encode_iterm2(b"png", 20) == "\x1b]1337;File=inline=1;size=3;height=20;preserveAspectRatio=1:cG5n\x07"


def read_sixel(text: str) -> Pixels:
    """Decode sixel data like a terminal; return the image with color levels from 0 to 100."""
    match = re.fullmatch('\x1bPq"1;1;([0-9]+);([0-9]+)(.*)\x1b\\\\', text, re.DOTALL)
    assert match is not None
    width, height = int(match[1]), int(match[2])
    image = numpy.full((height + 5, width, 3), -1)
    palette: dict[str, list[int]] = {}
    column = top = 0
    color = ""
    for token in re.findall(r"#[0-9]+;2;[0-9]+;[0-9]+;[0-9]+|#[0-9]+|![0-9]+[?-~]|[?-~]|\$|-", match[3]):
        if token.count(";") == 4:
            name, _, *levels = token.split(";")
            palette[name] = [int(level) for level in levels]
        elif token[0] == "#":
            color = token
        elif token == "$":
            column = 0
        elif token == "-":
            column, top = 0, top + 6
        else:
            count = int(token[1:-1]) if token[0] == "!" else 1
            for bit in range(6):
                if (ord(token[-1]) - 63) >> bit & 1:
                    image[top + bit, column : column + count] = palette[color]
            column += count
    return image[:height]


@settings(max_examples=25, deadline=None)
@given(width=st.integers(1, 40), height=st.integers(1, 20), colors=st.integers(1, 256))
def test_sixel_draws_every_pixel_in_its_color(width: int, height: int, colors: int) -> None:
    image = noise(width, height, colors)
    seen = numpy.asarray(image.quantize(256).convert("RGB"))
    assert numpy.abs(read_sixel(encode_sixel(image)) - seen * (100 / 255)).max() <= 0.51


def read_blocks(text: str) -> tuple[Pixels, Pixels]:
    rows = [re.findall(r"\x1b\[38;2;(\d+);(\d+);(\d+);48;2;(\d+);(\d+);(\d+)m▀", line) for line in text.split("\n")]
    cells = numpy.array(rows, dtype=int)
    return cells[..., :3], cells[..., 3:]


def test_half_block_shows_two_pixels() -> None:
    image = noise(12, 10)
    text = encode_blocks(image, 12, 5, true_color=True)
    upper, lower = read_blocks(text)
    pixels = numpy.asarray(image)
    assert (upper == pixels[0::2]).all()
    assert (lower == pixels[1::2]).all()
    assert all(line.endswith("\x1b[0m") for line in text.split("\n"))


@pytest.mark.parametrize(
    ("size", "cells"),
    [((128, 128), (64, 32)), ((256, 64), (64, 8)), ((64, 512), (8, 32)), ((1, 900), (1, 32)), ((3, 1), (64, 10))],
)
def test_half_blocks_keep_the_aspect_ratio_and_fit(size: tuple[int, int], cells: tuple[int, int]) -> None:
    upper, _ = read_blocks(encode_blocks(Image.new("RGB", size), 64, 32, true_color=True))
    width, height = cells
    assert abs(upper.shape[1] - width) <= 1
    assert abs(upper.shape[0] - height) <= 1


def test_palette_of_256_colors_uses_the_nearest_color() -> None:
    image = Image.new("RGB", (1, 2))
    image.putpixel((0, 0), (250, 3, 130))
    image.putpixel((0, 1), (0, 0, 0))
    assert encode_blocks(image, 1, 1, true_color=False) == f"\x1b[38;5;{16 + 36 * 5 + 2};48;5;16m▀\x1b[0m"


@pytest.mark.parametrize(
    ("environment", "protocol"),
    [
        ({"TERM": "xterm-kitty"}, "kitty"),
        ({"TERM": "xterm-ghostty"}, "kitty"),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1"}, "kitty"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "WezTerm"}, "kitty"),
        ({"TERM": "xterm-256color", "KONSOLE_VERSION": "230804"}, "kitty"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"}, "iterm2"),
        ({"TERM": "xterm-256color", "LC_TERMINAL": "iTerm2"}, "iterm2"),
        ({"TERM": "xterm", "TERM_PROGRAM": "mintty"}, "iterm2"),
        ({"TERM": "xterm-256color"}, "blocks"),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1", "TMUX": "/tmp/tmux"}, "blocks"),
        ({"TERM": "screen-256color", "LC_TERMINAL": "iTerm2"}, "blocks"),
        ({"TERM": "xterm-kitty", "NO_COLOR": "1"}, "never"),
        ({"TERM": "dumb"}, "never"),
        ({}, "never"),
    ],
)
def test_environment_selects_the_protocol(environment: dict[str, str], protocol: str) -> None:
    assert choose_protocol(environment, lambda: False, "utf-8") == protocol


def test_terminal_is_queried_only_if_the_environment_does_not_decide() -> None:
    queries: list[bool] = []

    def supports_sixel() -> bool:
        queries.append(True)
        return True

    assert choose_protocol({"TERM": "xterm-256color"}, supports_sixel, "utf-8") == "sixel"
    assert choose_protocol({"TERM": "xterm-kitty"}, supports_sixel, "utf-8") == "kitty"
    assert choose_protocol({"TERM": "tmux-256color"}, supports_sixel, "utf-8") == "blocks"
    assert len(queries) == 1
    assert choose_protocol({"TERM": "xterm"}, lambda: False, "ascii") == "never", "ASCII has no half block"


def test_nothing_is_shown_without_a_terminal() -> None:
    stream = io.StringIO()
    for protocol in PROTOCOLS:
        show_image(noise(8, 8), stream, protocol)
    assert stream.getvalue() == ""
    assert query_sixel() is False


def test_unknown_protocol_is_rejected() -> None:
    with pytest.raises(UsageError, match="'kity'") as caught:
        check_protocol("kity")
    assert "did you mean kitty?" in caught.value.hint
