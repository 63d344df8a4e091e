"""How many images run in one call."""

from __future__ import annotations

from anyaccel.backends.claim import Limit
from anyaccel.backends.sheet import Sheet
from anyaccel.planning.decision import Decision
from anyaccel.planning.options import PlacementOptions

__all__ = ["choose_images_per_call"]


def choose_images_per_call(sheet: Sheet, options: PlacementOptions) -> Decision[int | None]:
    """One where batches are not reliable, as many as are asked for otherwise (None)."""
    if options.images_per_call is not None:
        return Decision(options.images_per_call, "asked for")
    if not sheet.reliable_batches and isinstance(sheet.batches, Limit):
        return Decision(1, f"{sheet.batches.says} ({sheet.batches.source})")
    return Decision(None, f"nothing is known against batches here: {sheet.batches.says}")
