"""Planning: turning a device sheet, facts about a pipeline and the user's options into a plan.

Nothing here imports torch or opens a device, so plans can be created for hardware that is not installed.
"""

from anyaccel.planning.decision import Decision
from anyaccel.planning.facts import ComponentFacts, PipelineFacts
from anyaccel.planning.options import PlacementOptions
from anyaccel.planning.plan import Plan, make_plan

__all__ = ["ComponentFacts", "Decision", "PipelineFacts", "PlacementOptions", "Plan", "make_plan"]
