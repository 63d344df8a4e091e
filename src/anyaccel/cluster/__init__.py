"""Batch jobs, servers and distributed programs on several devices and machines, optionally on Ray."""
