"""Private APIs of transformers, as of transformers 5.22.2. File paths are relative to its package."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["OUTPUT_HOOKS_ATTRIBUTE", "is_transformers_model", "read_attention_functions", "read_float32_modules"]

# Attribute of a model that has registered its output hooks (utils/output_capturing.py). Remove it from a copy without
# the hooks, otherwise transformers does not register them again.
OUTPUT_HOOKS_ATTRIBUTE = "_output_capturing_hooks_installed"


def is_transformers_model(model: Any) -> bool:
    """Return whether a model's class is defined in transformers."""
    return type(model).__module__.startswith("transformers.")


def read_attention_functions() -> Mapping[str, Any]:
    """Return the registered attention functions by name (modeling_utils.py)."""
    module = sys.modules.get("transformers.modeling_utils")
    functions: Mapping[str, Any] = getattr(module, "ALL_ATTENTION_FUNCTIONS", {})
    return functions


def read_float32_modules(model: Any, dtype: str) -> tuple[str, ...]:
    """Return the names of modules that stay in float32 if the model uses `dtype` (modeling_utils.py).

    `_keep_in_fp32_modules` applies only to float16; `_keep_in_fp32_modules_strict` also applies to
    bfloat16.
    """
    name = "_keep_in_fp32_modules" if dtype == "float16" else "_keep_in_fp32_modules_strict"
    return tuple(getattr(model, name, None) or ())
