"""Plans with decisions that no sheet leads to, for tests of single decisions."""

from dataclasses import replace
from typing import Any

from anyaccel.runtime.placement_state import Placement, find_placement, set_placement

__all__ = ["force_plan"]


def force_plan(pipe: Any, **decisions: Any) -> Placement:
    """Replace decisions in the plan of a placed pipeline; return the new placement."""
    placement = find_placement(pipe)
    assert placement is not None
    plan = replace(placement.plan, **decisions)
    forced = replace(placement, plan=plan, call_plan=plan)
    set_placement(pipe, forced)
    return forced
