"""Pictures in the terminal: each encoding is read back as a terminal reads it, and the right one is chosen."""

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
    WAYS,
    ask_for_sixel,
    check_protocol,
    choose_protocol,
    encode_blocks,
    encode_iterm2,
    encode_kitty,
    encode_sixel,
    show_image,
)
from anyaccel.errors import UsageError

Pixels = npt.NDArray[numpy.int_]


def noise(width: int, height: int, colours: int = 200, seed: int = 1) -> Image.Image:
    generator = numpy.random.default_rng(seed)
    palette = generator.integers(0, 256, (colours, 3), dtype=numpy.uint8)
    return Image.fromarray(palette[generator.integers(0, colours, (height, width))])


def test_kitty_gets_the_file_in_parts() -> None:
    png = bytes(range(256)) * 50
    parts = re.findall("\x1b_G([^;]*);([^\x1b]*)\x1b\\\\", encode_kitty(png, 20))
    assert base64.b64decode("".join(data for _, data in parts)) == png
    assert all(len(data) <= 4096 for _, data in parts)
    assert all(len(data) % 4 == 0 for _, data in parts)
    first = dict(key.split("=") for key in parts[0][0].split(","))
    assert first == {"f": "100", "a": "T", "r": "20", "q": "2", "m": "1"}
    assert [keys for keys, _ in parts[1:]] == ["m=1"] * (len(parts) - 2) + ["m=0"]


def test_kitty_gets_a_small_file_at_once() -> None:
    assert encode_kitty(b"png", 2) == "\x1b_Gf=100,a=T,r=2,q=2,m=0;cG5n\x1b\\"


def test_iterm2_gets_the_file_whole() -> None:
    assert encode_iterm2(b"png", 20) == "\x1b]1337;File=inline=1;size=3;height=20;preserveAspectRatio=1:cG5n\x07"


def read_sixel(text: str) -> Pixels:
    """The picture that a terminal would draw, each colour from 0 to 100."""
    match = re.fullmatch('\x1bPq"1;1;([0-9]+);([0-9]+)(.*)\x1b\\\\', text, re.DOTALL)
    assert match is not None
    width, height = int(match[1]), int(match[2])
    picture = numpy.full((height + 5, width, 3), -1)
    palette: dict[str, list[int]] = {}
    column = top = 0
    colour = ""
    for token in re.findall(r"#[0-9]+;2;[0-9]+;[0-9]+;[0-9]+|#[0-9]+|![0-9]+[?-~]|[?-~]|\$|-", match[3]):
        if token.count(";") == 4:
            name, _, *levels = token.split(";")
            palette[name] = [int(level) for level in levels]
        elif token[0] == "#":
            colour = token
        elif token == "$":
            column = 0
        elif token == "-":
            column, top = 0, top + 6
        else:
            count = int(token[1:-1]) if token[0] == "!" else 1
            for bit in range(6):
                if (ord(token[-1]) - 63) >> bit & 1:
                    picture[top + bit, column : column + count] = palette[colour]
            column += count
    return picture[:height]


@settings(max_examples=25, deadline=None)
@given(width=st.integers(1, 40), height=st.integers(1, 20), colours=st.integers(1, 256))
def test_sixels_draw_every_pixel_in_its_colour(width: int, height: int, colours: int) -> None:
    image = noise(width, height, colours)
    seen = numpy.asarray(image.quantize(256).convert("RGB"))
    assert numpy.abs(read_sixel(encode_sixel(image)) - seen * (100 / 255)).max() <= 0.51


def read_blocks(text: str) -> tuple[Pixels, Pixels]:
    rows = [re.findall(r"\x1b\[38;2;(\d+);(\d+);(\d+);48;2;(\d+);(\d+);(\d+)m▀", line) for line in text.split("\n")]
    cells = numpy.array(rows, dtype=int)
    return cells[..., :3], cells[..., 3:]


def test_blocks_show_two_pixels_each() -> None:
    image = noise(12, 10)
    text = encode_blocks(image, 12, 5, all_colours=True)
    upper, lower = read_blocks(text)
    pixels = numpy.asarray(image)
    assert (upper == pixels[0::2]).all()
    assert (lower == pixels[1::2]).all()
    assert all(line.endswith("\x1b[0m") for line in text.split("\n"))


@pytest.mark.parametrize(
    ("size", "cells"),
    [((128, 128), (64, 32)), ((256, 64), (64, 8)), ((64, 512), (8, 32)), ((1, 900), (1, 32)), ((3, 1), (64, 10))],
)
def test_blocks_keep_the_shape_and_fit(size: tuple[int, int], cells: tuple[int, int]) -> None:
    upper, _ = read_blocks(encode_blocks(Image.new("RGB", size), 64, 32, all_colours=True))
    width, height = cells
    assert abs(upper.shape[1] - width) <= 1
    assert abs(upper.shape[0] - height) <= 1


def test_a_terminal_of_256_colours_gets_the_nearest() -> None:
    image = Image.new("RGB", (1, 2))
    image.putpixel((0, 0), (250, 3, 130))
    image.putpixel((0, 1), (0, 0, 0))
    assert encode_blocks(image, 1, 1, all_colours=False) == f"\x1b[38;5;{16 + 36 * 5 + 2};48;5;16m▀\x1b[0m"


@pytest.mark.parametrize(
    ("environment", "way"),
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
def test_the_environment_says_how(environment: dict[str, str], way: str) -> None:
    assert choose_protocol(environment, lambda: False, "utf-8") == way


def test_a_terminal_is_asked_only_if_that_leaves_it_open() -> None:
    asked: list[bool] = []

    def answer() -> bool:
        asked.append(True)
        return True

    assert choose_protocol({"TERM": "xterm-256color"}, answer, "utf-8") == "sixel"
    assert choose_protocol({"TERM": "xterm-kitty"}, answer, "utf-8") == "kitty"
    assert choose_protocol({"TERM": "tmux-256color"}, answer, "utf-8") == "blocks"
    assert len(asked) == 1
    assert choose_protocol({"TERM": "xterm"}, lambda: False, "ascii") == "never", "it cannot show a half block"


def test_nothing_is_shown_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    for way in WAYS:
        show_image(noise(8, 8), stream, way)
    assert stream.getvalue() == ""
    assert ask_for_sixel() is False


def test_a_way_that_there_is_not() -> None:
    with pytest.raises(UsageError, match="'kity'") as caught:
        check_protocol("kity")
    assert "did you mean kitty?" in caught.value.hint
