"""Proxies for torch, diffusers, transformers and NumPy that import the library on first use."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["diffusers", "numpy", "torch", "transformers"]


class LazyModule:
    """A proxy for a module that is imported on first attribute access."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


# Typed as Any: the constructors of models are untyped, or decorators hide their arguments.
diffusers: Any = LazyModule("diffusers")
numpy: Any = LazyModule("numpy")
torch: Any = LazyModule("torch")
transformers: Any = LazyModule("transformers")
