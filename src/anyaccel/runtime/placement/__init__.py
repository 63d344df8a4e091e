"""Placement of a pipeline on a device: weights, offloading, and retries after out-of-memory errors."""
