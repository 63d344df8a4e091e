"""Knowing that a pipeline is portable, without the hardware."""
