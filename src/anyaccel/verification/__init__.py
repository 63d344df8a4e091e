"""Verification: the sheet of a device held against the device itself, written down as evidence."""
