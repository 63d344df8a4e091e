"""Compatibility chart: results for all tiny test pipelines on all virtual devices.

It is written as JSON, as Markdown and as an interactive HTML page.
"""
