"""Deciding: a sheet, facts about a model and a user's wishes become a plan. Nothing here touches a device or torch."""

from anyaccel.planning.decision import Decision
from anyaccel.planning.facts import ComponentFacts, PipelineFacts
from anyaccel.planning.options import PlacementOptions
from anyaccel.planning.plan import Plan, make_plan

__all__ = ["ComponentFacts", "Decision", "PipelineFacts", "PlacementOptions", "Plan", "make_plan"]
