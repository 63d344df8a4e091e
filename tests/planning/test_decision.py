"""A decision in words."""

from __future__ import annotations

import pytest

from anyaccel.planning import Decision


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "-"),
        ((), "-"),
        ("", "-"),
        (True, "yes"),
        (False, "no"),
        (1, "1"),
        (0, "0"),
        ("host", "host"),
        (("dtypes", "noise"), "dtypes, noise"),
        ((("float64", "float32"), ("int64", "int32")), "float64 → float32, int64 → int32"),
    ],
)
def test_a_value_is_written_as_people_read_it(value: object, words: str) -> None:
    assert str(Decision(value, "a reason")) == words
