"""Printed form of decisions."""

from __future__ import annotations

import pytest

from anyaccel.planning import Decision


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        ((), "-"),
        ("", "-"),
        (True, "yes"),
        (False, "no"),
        (1, "1"),
        (0, "0"),
        ("cpu", "cpu"),
        (("dtypes", "noise"), "dtypes, noise"),
        ((("float64", "float32"), ("int64", "int32")), "float64 → float32, int64 → int32"),
    ],
)
def test_values_are_formatted_for_humans(value: object, text: str) -> None:
    assert str(Decision(value, "a reason")) == text
