"""Tracing: a pipeline run once with shapes alone, to know ahead of time what a device will hold."""
