"""Choice of the device that draws the initial noise.

It is always the CPU, so a seed gives the same noise on every device.
"""

from __future__ import annotations

from anyaccel.backends.sheet import Sheet
from anyaccel.planning.decision import Decision

__all__ = ["choose_noise"]


def choose_noise(sheet: Sheet) -> Decision[str]:
    """Return the device that draws the initial noise: always `cpu`, with a reason specific to the device."""
    # A generator that the caller passes still draws on its own device, if that device has random numbers.
    if sheet.rng_on_device:
        return Decision(
            "cpu",
            "drawn in float32 on the CPU, then cast: a seed gives the same noise on every device, for every dtype and "
            "batch size",
        )
    return Decision(
        "cpu", f"the device has no reliable random number generator: {sheet.random_numbers.says.removesuffix('.')}"
    )
