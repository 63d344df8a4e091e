"""Unmodified CUDA scripts on any device."""
