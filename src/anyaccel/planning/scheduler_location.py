"""The device that holds the scheduler's timesteps and sigmas."""

from __future__ import annotations

from anyaccel.backends.claim import Limit
from anyaccel.backends.sheet import Sheet
from anyaccel.planning.decision import Decision
from anyaccel.planning.options import PlacementOptions

__all__ = ["choose_scheduler_location"]


def choose_scheduler_location(sheet: Sheet, options: PlacementOptions) -> Decision[str]:
    """Return where the scheduler's timesteps and sigmas are stored: `cpu` or `device`.

    Unless the user sets this option, use `cpu` if looking up a timestep on the device fails or
    requires a round trip to the host at every step.
    """
    if options.scheduler is not None:
        return Decision(options.scheduler, f"scheduler={options.scheduler!r} was requested")
    # diffusers' index_for_timestep calls nonzero() and item(): https://github.com/huggingface/diffusers/pull/11696
    if sheet.static_shapes and isinstance(sheet.data_dependent_shapes, Limit):
        return Decision("cpu", sheet.data_dependent_shapes.says)
    if isinstance(sheet.host_round_trip, Limit):
        return Decision("cpu", sheet.host_round_trip.says)
    return Decision("device", "timestep lookups are not known to be slow on this device")
