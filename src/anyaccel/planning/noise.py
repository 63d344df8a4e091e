"""Where noise is drawn: on the host, so that a seed means one thing on every device."""

from __future__ import annotations

from anyaccel.backends.sheet import Sheet
from anyaccel.planning.decision import Decision

__all__ = ["choose_noise"]


def choose_noise(sheet: Sheet) -> Decision[str]:
    """Always the host, in float32, cast afterwards; a caller's generator of the device draws there where it can."""
    if sheet.rng_on_device:
        return Decision(
            "cpu", "drawn in float32 and cast: a seed gives one picture on every device, in every type and batch"
        )
    return Decision("cpu", f"the device has no random numbers to rely on: {sheet.random_numbers.says}")
