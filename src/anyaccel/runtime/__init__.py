"""Doing: places a pipeline as its plan says, and runs it. One file a concern."""
