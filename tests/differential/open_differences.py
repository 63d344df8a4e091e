"""Known differences from stock diffusers that are not fixed yet. Remove an entry with its fix."""

from __future__ import annotations

__all__ = ["OPEN"]

OPEN: dict[str, dict[str, str]] = {
    "mps": {
        "compiled_by_the_user": "Dynamo compiles the function mode of the workarounds and confuses its functions",
    },
}
"""For each variant, usages with the reason of the difference."""
