"""Tracing: a pipeline run once with shapes and no numbers, to know ahead of time what a device will hold."""
