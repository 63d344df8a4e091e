"""Validation, warmup and execution of calls to a placed pipeline."""
