"""The usages. Importing this package registers them in `USAGES`."""

from tests.differential.usages import (
    adapters,
    building,
    caching,
    callbacks,
    calls,
    features,
    models,
    modes,
    patches,
    schedulers,
    threads,
    weights,
)

__all__ = [
    "adapters", "building", "caching", "callbacks", "calls", "features", "models", "modes", "patches", "schedulers",
    "threads", "weights",
]  # fmt: skip
