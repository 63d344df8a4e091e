"""Where noise is drawn."""

from __future__ import annotations

from anyaccel.backends.claim import Unknown
from anyaccel.planning.noise import choose_noise
from tests.planning.sheets import NAMES, limit, real_sheet, without_limits


def test_noise_is_drawn_on_the_host_and_the_reason_is_the_devices() -> None:
    assert "one picture on every device" in choose_noise(without_limits()).reason
    lacking = choose_noise(without_limits(random_numbers=limit("error", says="It has none.")))
    assert (lacking.value, "It has none." in lacking.reason) == ("cpu", True)
    unknown = choose_noise(without_limits(random_numbers=Unknown(says="Not found.")))
    assert "Not found." in unknown.reason


def test_the_sheets() -> None:
    assert {choose_noise(real_sheet(name)).value for name in NAMES} == {"cpu"}
