"""Reading and checking options."""

from __future__ import annotations

from typing import Any

import pytest

from anyaccel.errors import UsageError
from anyaccel.planning import PlacementOptions
from anyaccel.planning.options import read_options


def test_options_are_added_to_earlier_ones() -> None:
    before = read_options({"dtype": "float16", "images_per_call": 2})
    assert read_options({"attention_slicing": "max"}, before) == PlacementOptions(
        dtype="float16", images_per_call=2, attention_slicing="max"
    )
    assert read_options({"dtype": "float32"}, before).dtype == "float32"
    assert read_options({}) == PlacementOptions()
    assert read_options({"attention_slicing": None}, PlacementOptions(attention_slicing=2)).attention_slicing is None


@pytest.mark.parametrize(
    ("misspelled", "option"),
    [
        ("attention_slice", "attention_slicing"),
        ("dtyp", "dtype"),
        ("image_per_call", "images_per_call"),
        ("schedul", "scheduler"),
        ("hpu_migrate", "hpu_migration"),
    ],
)
def test_unknown_option_suggests_the_nearest(misspelled: str, option: str) -> None:
    with pytest.raises(UsageError, match=f"unknown option '{misspelled}'") as caught:
        read_options({misspelled: 1})
    assert option in caught.value.hint


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_slicing", "half"),
        ("attention_slicing", 0),
        ("attention_slicing", -2),
        ("attention_slicing", True),
        ("images_per_call", 0),
        ("images_per_call", False),
        ("scheduler", "gpu"),
        ("vae_tiling", "yes"),
        ("check_finite", None),
        ("check_finite", 1),
        ("sdp_on_bf16", "no"),
        ("hpu_migration", "off"),
        ("dtype", "int8"),
        ("dtype", "complex64"),
        ("smallest_dtype", "float8_e4m3fn"),
        ("compile", 0),
        ("compile", 1),
        ("compile", 1.0),
        ("compile", None),
        ("compile", "max-autotune"),
        ("expected_images", 0),
        ("expected_images", -3),
        ("expected_images", True),
        ("expected_images", 2.5),
        ("expected_images", "500"),
    ],
)
def test_invalid_value_raises_with_a_hint(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name) as caught:
        read_options({name: value})
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "value"), [("images_per_call", "2"), ("images_per_call", 1.5), ("attention_slicing", 2.0)]
)
def test_value_of_another_type_raises(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name):
        read_options({name: value})


def test_compile_and_expected_images() -> None:
    for value in ("auto", True, False):
        assert read_options({"compile": value, "expected_images": 500}).compile is value
    assert read_options({"expected_images": None}, PlacementOptions(expected_images=2)).expected_images is None
