"""Workarounds for device limits, applied while a pipeline runs."""
