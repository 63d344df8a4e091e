"""Portability checks, which run pipelines on virtual devices instead of the hardware."""
