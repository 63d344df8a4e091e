"""`anyaccel generate`."""
