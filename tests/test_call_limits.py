"""Checks of call arguments: accepted values and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from anyaccel.call_limits import (
    LARGEST_SEED,
    check_batch,
    check_multiple,
    check_side,
    check_steps,
    parse_image_size,
    read_seed,
    read_seeds,
    to_integer,
)
from anyaccel.errors import UsageError

INTEGERS: list[Any] = [7, numpy.int64(7), numpy.uint8(7), torch.tensor(7)]


def check_width(value: Any) -> int:
    return check_side("width", value)


@pytest.mark.parametrize("value", INTEGERS, ids=lambda value: type(value).__name__)
def test_integers_of_every_library_become_python_ints(value: Any) -> None:
    for read in (to_integer, check_steps, check_batch, read_seed, check_width):
        result = read(value)
        assert result == 7
        assert type(result) is int
    assert read_seeds(value, 2) == (7, 8)


@pytest.mark.parametrize("value", [True, 7.0, numpy.float32(7), "7", None, [7], torch.tensor([7, 8])], ids=repr)
def test_values_that_are_not_integers_raise(value: Any) -> None:
    assert to_integer(value) is None
    for read in (check_steps, check_batch, read_seed, check_width):
        with pytest.raises(UsageError, match=r"must be an? (positive )?integer") as caught:
            read(value)
        assert caught.value.hint


def test_limits_are_inclusive() -> None:
    limits: list[tuple[Callable[[Any], int], int, int | None]] = [
        (check_width, 1, 16_384),
        (check_batch, 1, 1024),
        (read_seed, 0, LARGEST_SEED),
        (check_steps, 1, None),
    ]
    for read, smallest, largest in limits:
        assert read(smallest) == smallest
        outside = [smallest - 1]
        if largest is not None:
            assert read(largest) == largest
            outside.append(largest + 1)
        for value in outside:
            with pytest.raises(UsageError, match=r"must be an? (positive )?integer"):
                read(value)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512x768", (512, 768)),
        ("64", (64, 64)),
        ("8X9", (8, 9)),
        ("8\N{MULTIPLICATION SIGN}9", (8, 9)),
        (" 8 ", (8, 8)),
    ],
)
def test_valid_image_sizes(text: str, size: tuple[int, int]) -> None:
    assert parse_image_size(text) == size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "invalid image size") for text in ("", "x", "8x", "-8x8", "1e3x8", "8x8x8", "\u0668", "9" * 30)),
        ("0x8", "width must be an integer from 1 to 16384 pixels, not 0"),
        ("8x99999", "height must be an integer from 1 to 16384 pixels, not 99999"),
    ],
)
def test_invalid_image_sizes_raise(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_image_size(text)
    assert "512x768" in caught.value.hint


@pytest.mark.parametrize(("side", "hint"), [(17, "use 16 or 24"), (7, "use 8")])
def test_nearest_multiples_are_suggested(side: int, hint: str) -> None:
    check_multiple("height", 16, 8)
    with pytest.raises(UsageError, match=f"height must be a multiple of 8 for this model, not {side}") as caught:
        check_multiple("height", side, 8)
    assert caught.value.hint == hint


def test_seeds_of_several_images() -> None:
    assert read_seeds(LARGEST_SEED, 2) == (LARGEST_SEED, 0)
    assert read_seeds([3, numpy.int64(1)], 2) == (3, 1)
    with pytest.raises(UsageError, match="got 2 seeds for 3 images"):
        read_seeds([1, 2], 3)
