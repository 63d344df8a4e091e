"""The usages. Importing this package registers them in `USAGES`."""

from tests.differential.usages import (
    adapters,
    building,
    callbacks,
    calls,
    features,
    modes,
    patches,
    schedulers,
    weights,
)

__all__ = ["adapters", "building", "callbacks", "calls", "features", "modes", "patches", "schedulers", "weights"]
