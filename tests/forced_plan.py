"""Plans that no sheet leads to, for tests of what a plan decides."""

from dataclasses import replace
from typing import Any

from anyaccel.runtime.placement_state import Placement, find_placement, set_placement

__all__ = ["force_plan"]


def force_plan(pipe: Any, **decisions: Any) -> Placement:
    """Place a pipeline as before, with some decisions replaced."""
    placement = find_placement(pipe)
    assert placement is not None
    plan = replace(placement.plan, **decisions)
    forced = replace(placement, plan=plan, call_plan=plan)
    set_placement(pipe, forced)
    return forced
