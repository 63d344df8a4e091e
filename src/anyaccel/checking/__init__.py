"""Portability checks of pipelines on virtual devices, without the hardware."""
