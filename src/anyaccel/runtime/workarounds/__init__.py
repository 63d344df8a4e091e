"""Workarounds for a device's limits, applied while a pipeline runs."""
