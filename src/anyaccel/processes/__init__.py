"""Utilities for child processes, signals and the garbage collector."""
