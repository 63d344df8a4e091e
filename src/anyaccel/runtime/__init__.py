"""Placement of pipelines on a device according to a plan, and execution of pipeline calls."""
