"""The number of images that the models of a pipeline run at a time."""

from __future__ import annotations

from anyaccel.backends.claim import Limit
from anyaccel.backends.sheet import Sheet
from anyaccel.planning.decision import Decision, cite
from anyaccel.planning.options import PlacementOptions

__all__ = ["choose_images_per_call"]


def choose_images_per_call(sheet: Sheet, options: PlacementOptions) -> Decision[int | None]:
    """Return the number of images that the models run at a time, or None for the whole batch.

    This is the requested number, or 1 if batches are known to be unreliable on the device.
    """
    if options.images_per_call is not None:
        return Decision(options.images_per_call, f"images_per_call={options.images_per_call} was requested")
    # An unknown answer counts as reliable: one image at a time would slow down every device without a report.
    if not sheet.reliable_batches and isinstance(sheet.batches, Limit):
        return Decision(1, cite(sheet.batches))
    return Decision(None, f"no known issues with batches on this device: {sheet.batches.says.removesuffix('.')}")
