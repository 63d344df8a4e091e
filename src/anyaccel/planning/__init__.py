"""Planning: how to run a pipeline on a device, based on the device's sheet and the user's options.

This package does not import torch or open a device, so it can create plans for hardware that is
not installed.
"""

from anyaccel.planning.decision import Decision
from anyaccel.planning.facts import ComponentFacts, PipelineFacts
from anyaccel.planning.options import PlacementOptions
from anyaccel.planning.plan import Plan, make_plan

__all__ = ["ComponentFacts", "Decision", "PipelineFacts", "PlacementOptions", "Plan", "make_plan"]
