"""Tracing: a pipeline run on the `meta` device, used to predict memory use on a real device."""
