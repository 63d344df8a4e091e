"""Verification of a device sheet on the device itself, recorded as evidence."""
