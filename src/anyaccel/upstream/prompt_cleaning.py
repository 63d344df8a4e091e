"""Prompt cleaning with ftfy, an optional dependency of diffusers, in pipelines/*/pipeline_*.py (diffusers 0.42.1)."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from typing import Any

__all__ = ["needs_ftfy"]


def needs_ftfy(pipeline_class: type) -> bool:
    """Return whether a pipeline fails with a NameError for a prompt, because ftfy is not installed.

    Most pipelines of diffusers clean prompts only if ftfy is installed.
    """
    module: Any = sys.modules.get(pipeline_class.__module__)
    function = getattr(module, "basic_clean", None)
    if function is None or importlib.util.find_spec("ftfy") is not None:
        return False
    source = inspect.getsource(function)
    return "ftfy.fix_text" in source and "is_ftfy_available()" not in source
