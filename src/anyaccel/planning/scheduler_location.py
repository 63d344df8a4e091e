"""Where the scheduler's timesteps and sigmas live."""

from __future__ import annotations

from anyaccel.backends.claim import Limit
from anyaccel.backends.sheet import Sheet
from anyaccel.planning.decision import Decision
from anyaccel.planning.options import PlacementOptions

__all__ = ["choose_scheduler_location"]


def choose_scheduler_location(sheet: Sheet, options: PlacementOptions) -> Decision[str]:
    """The host, unless the device is the host: looking a timestep up on the device costs a round trip a step."""
    if options.scheduler is not None:
        return Decision(options.scheduler, "asked for")
    if sheet.static_shapes and isinstance(sheet.data_dependent_shapes, Limit):
        return Decision("cpu", sheet.data_dependent_shapes.says)
    if isinstance(sheet.host_round_trip, Limit):
        return Decision("cpu", sheet.host_round_trip.says)
    return Decision("device", "nothing is known against looking a timestep up where the pipeline is")
