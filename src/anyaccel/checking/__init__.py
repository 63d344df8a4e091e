"""Portability checks for pipelines on virtual devices, without the hardware."""
