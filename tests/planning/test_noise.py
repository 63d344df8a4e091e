"""Choice of the device that draws noise."""

from __future__ import annotations

from anyaccel.backends.claim import Unknown
from anyaccel.planning.noise import choose_noise
from tests.planning.sheets import NAMES, limit, real_sheet, without_limits


def test_noise_is_drawn_on_the_cpu_with_a_reason_per_device() -> None:
    assert "the same noise on every device" in choose_noise(without_limits()).reason
    missing = choose_noise(without_limits(random_numbers=limit("error", says="It has none.")))
    assert (missing.value, "It has none" in missing.reason) == ("cpu", True)
    unknown = choose_noise(without_limits(random_numbers=Unknown(says="Not found.")))
    assert "Not found" in unknown.reason


def test_built_in_sheets() -> None:
    assert {choose_noise(real_sheet(name)).value for name in NAMES} == {"cpu"}
