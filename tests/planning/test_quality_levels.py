"""Speed levels: which steps run, and where float8 is used."""

import pytest

from anyaccel.backends.device import sheet
from anyaccel.errors import UsageError
from anyaccel.planning.options import PlacementOptions, read_options
from anyaccel.planning.quality_levels import StepSkipping, choose_quantization, choose_step_skipping


def rule(speed: str) -> StepSkipping:
    skipping = choose_step_skipping(PlacementOptions(speed=speed)).value
    assert skipping is not None
    return skipping


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
def test_steps_that_run(speed: str, steps: int, expected: str) -> None:
    skipping = rule(speed)
    assert "".join("r" if skipping.is_run(step, steps) else "-" for step in range(steps)) == expected
    assert skipping.count(steps) == expected.count("r")


@pytest.mark.parametrize("steps", range(1, 60))
def test_first_and_last_step_always_run(steps: int) -> None:
    for speed in ("fast", "draft"):
        assert rule(speed).is_run(0, steps)
        assert rule(speed).is_run(steps - 1, steps)
        assert rule(speed).is_run(steps, steps), "a scheduler may take more steps than announced"


def test_exact_runs_every_step_in_the_dtype_of_the_model() -> None:
    assert choose_step_skipping(PlacementOptions()).value is None
    assert not choose_quantization(sheet("cuda"), PlacementOptions(), "bfloat16").value


@pytest.mark.parametrize(
    ("device", "dtype", "value", "reason"),
    [
        ("cuda", "bfloat16", "float8", "float8"),
        ("cuda", "float32", "", "half-precision"),
        ("mps", "float16", "", "not known"),
        ("cpu", "float32", "", "not known"),
    ],
)
def test_float8_is_used_for_half_precision_if_known_to_be_faster(
    device: str, dtype: str, value: str, reason: str
) -> None:
    decision = choose_quantization(sheet(device), PlacementOptions(speed="fast"), dtype)
    assert decision.value == value
    assert reason in decision.reason


def test_unknown_speed_raises() -> None:
    with pytest.raises(UsageError, match="speed must be one of exact, fast, draft") as caught:
        read_options({"speed": "fats"})
    assert "fast" in (caught.value.hint or "")
