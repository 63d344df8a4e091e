"""Batches, servers and ranks on many devices and machines, with or without Ray."""
