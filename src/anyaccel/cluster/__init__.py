"""Batch jobs, services and distributed ranks on several devices and machines, with or without Ray."""
