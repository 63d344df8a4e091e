"""Benchmarks that compare anyaccel with stock diffusers."""
