"""Placement of a pipeline on a device according to its plan, and execution of its calls."""
