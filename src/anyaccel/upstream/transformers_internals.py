"""Private details of transformers. Seen in transformers 5.22.2. Paths below are relative to the package."""

from __future__ import annotations

from typing import Any

__all__ = ["CAPTURE_MARK", "is_transformers_model", "read_float32_modules"]

CAPTURE_MARK = "_output_capturing_hooks_installed"
"""Set on a model that added hooks to itself; without those hooks it must not be set (utils/output_capturing.py)."""


def is_transformers_model(model: Any) -> bool:
    """Return whether a model's class is defined in transformers."""
    return type(model).__module__.startswith("transformers.")


def read_float32_modules(model: Any, dtype: str) -> tuple[str, ...]:
    """Return the names of modules that stay in float32 in a model of another dtype (modeling_utils.py).

    `_keep_in_fp32_modules` holds for float16 only, `_keep_in_fp32_modules_strict` for bfloat16 too.
    """
    name = "_keep_in_fp32_modules" if dtype == "float16" else "_keep_in_fp32_modules_strict"
    return tuple(getattr(model, name, None) or ())
