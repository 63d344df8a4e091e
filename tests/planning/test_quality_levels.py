"""One word for more speed: which steps are run, and where products go to 8 bits."""

import pytest

from anyaccel.backends.device import sheet
from anyaccel.errors import UsageError
from anyaccel.planning.options import PlacementOptions, read_options
from anyaccel.planning.quality_levels import StepSkipping, choose_quantization, choose_step_skipping


def rule(speed: str) -> StepSkipping:
    found = choose_step_skipping(PlacementOptions(speed=speed)).value
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("speed", "steps", "expected"),
    [
        ("fast", 8, "rr-r-r-r"),
        ("fast", 9, "rrr-r-r-r"),
        ("fast", 20, "rrrrr-r-r-r-r-r-r-rr"),
        ("fast", 6, "rr-r-r"),
        ("fast", 4, "r-rr"),
        ("fast", 3, "rrr"),
        ("fast", 1, "r"),
        ("draft", 8, "r--r--rr"),
        ("draft", 4, "r--r"),
        ("draft", 3, "rrr"),
    ],
)
def test_which_steps_are_run(speed: str, steps: int, expected: str) -> None:
    found = rule(speed)
    assert "".join("r" if found.is_run(step, steps) else "-" for step in range(steps)) == expected
    assert found.count(steps) == expected.count("r")


@pytest.mark.parametrize("steps", range(1, 60))
def test_the_first_and_the_last_step_are_always_run(steps: int) -> None:
    for speed in ("fast", "draft"):
        assert rule(speed).is_run(0, steps)
        assert rule(speed).is_run(steps - 1, steps)
        assert rule(speed).is_run(steps, steps), "a scheduler that takes more steps than it said"


def test_exact_runs_every_step_in_its_own_type() -> None:
    assert choose_step_skipping(PlacementOptions()).value is None
    assert not choose_quantization(sheet("cuda"), PlacementOptions(), "bfloat16").value


@pytest.mark.parametrize(
    ("device", "dtype", "value", "says"),
    [
        ("cuda", "bfloat16", "float8", "8 bits"),
        ("cuda", "float32", "", "half precision"),
        ("mps", "float16", "", "not known"),
        ("cpu", "float32", "", "not known"),
    ],
)
def test_where_products_go_to_8_bits(device: str, dtype: str, value: str, says: str) -> None:
    decision = choose_quantization(sheet(device), PlacementOptions(speed="fast"), dtype)
    assert decision.value == value
    assert says in decision.reason


def test_a_speed_that_there_is_not() -> None:
    with pytest.raises(UsageError, match="speed is one of exact, fast, draft") as caught:
        read_options({"speed": "fats"})
    assert "fast" in (caught.value.hint or "")
