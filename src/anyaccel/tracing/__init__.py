"""Tracing: runs a pipeline on the `meta` device to predict its memory use on a real device."""
