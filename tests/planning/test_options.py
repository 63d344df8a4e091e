"""What the user asked for, read and checked."""

from __future__ import annotations

from typing import Any

import pytest

from anyaccel.errors import UsageError
from anyaccel.planning import PlacementOptions
from anyaccel.planning.options import read_options


def test_wishes_are_added_to_earlier_ones() -> None:
    before = read_options({"dtype": "float16", "images_per_call": 2})
    assert read_options({"attention_slicing": "max"}, before) == PlacementOptions(
        dtype="float16", images_per_call=2, attention_slicing="max"
    )
    assert read_options({"dtype": "float32"}, before).dtype == "float32"
    assert read_options({}) == PlacementOptions()
    assert read_options({"attention_slicing": None}, PlacementOptions(attention_slicing=2)).attention_slicing is None


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("attention_slice", "attention_slicing"),
        ("dtyp", "dtype"),
        ("image_per_call", "images_per_call"),
        ("schedul", "schedule"),
        ("hpu_migrate", "hpu_migration"),
    ],
)
def test_a_wish_that_there_is_not_is_an_error_that_names_the_nearest(asked: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"no wish '{asked}'") as caught:
        read_options({asked: 1})
    assert meant in caught.value.hint


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_slicing", "half"),
        ("attention_slicing", 0),
        ("attention_slicing", -2),
        ("attention_slicing", True),
        ("images_per_call", 0),
        ("images_per_call", False),
        ("schedule", "gpu"),
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
def test_a_value_that_means_nothing_is_an_error_with_a_hint(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name) as caught:
        read_options({name: value})
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "value"), [("images_per_call", "2"), ("images_per_call", 1.5), ("attention_slicing", 2.0)]
)
def test_a_value_of_another_kind_is_an_error_too(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name):
        read_options({name: value})


def test_whether_and_for_how_many_pictures_to_compile() -> None:
    for asked in ("auto", True, False):
        assert read_options({"compile": asked, "expected_images": 500}).compile is asked
    assert read_options({"expected_images": None}, PlacementOptions(expected_images=2)).expected_images is None
