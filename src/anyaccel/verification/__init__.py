"""Verification of a capability sheet on the actual device; the results are recorded as evidence."""
