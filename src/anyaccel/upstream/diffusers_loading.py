"""The loading of a pipeline's components in diffusers 0.42.1. File paths are relative to the package of diffusers."""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["LoadedComponent", "calling_after_each_component"]

_LOCK = threading.RLock()

# Called with the name of a component, the component, the folder of the pipeline and the variant of the files.
LoadedComponent = Callable[[str, Any, str, str | None], None]


@contextmanager
def calling_after_each_component(function: LoadedComponent) -> Iterator[None]:
    """Call a function with each component that `from_pretrained` loads in this block, before it loads the next one.

    Components that the user passes are not loaded.
    """
    # pipelines/pipeline_utils.py: `from_pretrained` calls it with keyword arguments, once for each component.
    module: Any = importlib.import_module("diffusers.pipelines.pipeline_utils")
    thread = threading.get_ident()
    with _LOCK:
        load = module.load_sub_model

        @functools.wraps(load)
        def load_and_call(*args: Any, **kwargs: Any) -> Any:
            component = load(*args, **kwargs)
            if threading.get_ident() == thread:  # others load pipelines without anyaccel
                function(kwargs["name"], component, str(kwargs["cached_folder"]), kwargs.get("variant"))
            return component

        module.load_sub_model = load_and_call
        try:
            yield
        finally:
            module.load_sub_model = load
