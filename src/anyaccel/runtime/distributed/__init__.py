"""Pipelines on several devices, with parallel models or split classifier-free guidance."""
