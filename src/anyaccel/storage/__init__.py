"""Atomic file writes, the cache directory and file locks."""
