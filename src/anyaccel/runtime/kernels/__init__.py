"""Kernels of our own, for what a device's compiler leaves slow."""
