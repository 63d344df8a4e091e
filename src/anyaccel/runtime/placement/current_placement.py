"""The placement of a pipeline, also of one that was not placed by the user."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from anyaccel.planning.decision import Decision
from anyaccel.runtime.placement.place import attach_placement, plan_pipeline, resolve_device
from anyaccel.runtime.placement_state import Placement, drop_placement, find_options, find_placement
from anyaccel.upstream.diffusers_loading import find_offload_device

__all__ = ["require_placement"]


def require_placement(pipe: Any) -> Placement:
    """Return a pipeline's placement; if it has none, create one for its current device and dtype."""
    placement, offload_device = find_placement(pipe), find_offload_device(pipe)
    if placement is not None:
        is_current = placement.has_manager == bool(offload_device) and offload_device in (None, placement.device)
        if placement.running or is_current:
            return placement
        drop_placement(pipe)  # offloading by a components manager was enabled or disabled since
    device, dtype = getattr(pipe, "device", torch.device("cpu")), getattr(pipe, "dtype", torch.float32)
    device = offload_device or device
    placement_options = find_options(pipe)
    opened = resolve_device(device, placement_options)
    name = str(dtype).removeprefix("torch.")
    plan = plan_pipeline(
        pipe, opened, replace(placement_options, dtype=name), Decision(name, "the dtype of the loaded weights")
    )
    placement = Placement(opened, device, plan, placement_options)
    if offload_device:
        placement.residence, placement.offloaded_by_user, placement.has_manager = "component", True, True
    attach_placement(pipe, placement)
    return placement
