"""Benchmarks of anyaccel against stock diffusers."""
