"""Calls to a placed pipeline: validation, warmup and the run itself."""
