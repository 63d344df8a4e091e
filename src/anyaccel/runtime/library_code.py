"""Known libraries: functions and classes that are not from one of them are the user's own."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any

from anyaccel.backends.registry import load_registry
from anyaccel.upstream.diffusers_internals import ATTENTION_LIBRARIES

__all__ = ["MODEL_LIBRARIES", "find_source", "is_library", "is_library_code"]

# Libraries with layers and processors that do the same work at every call.
MODEL_LIBRARIES = frozenset(("torch", "diffusers", "transformers", "peft", "torchao", "accelerate", "anyaccel"))
# Other libraries that these import functions from, or whose decorators they use. Mocks of unittest are user code.
_IMPORTED_LIBRARIES = (
    MODEL_LIBRARIES
    | (sys.stdlib_module_names - {"unittest"})
    | {"huggingface_hub", "numpy", "packaging", "PIL", "safetensors", "scipy", "sentencepiece", "tokenizers", "tqdm"}
    | {"triton", "typing_extensions"}
    | ATTENTION_LIBRARIES
)
_BUILTINS = (BuiltinFunctionType, MethodDescriptorType)


def is_library_code(function: Any) -> bool:
    """Return whether a function, and all functions that decorators of libraries wrapped, belong to known libraries."""
    return all(is_library(find_source(layer)) for layer in _unwrap(function))


def is_library(source: str) -> bool:
    """Return whether a Python module belongs to a known library."""
    library = source.partition(".")[0]
    return library in _IMPORTED_LIBRARIES or library in _list_vendor_libraries()


def _unwrap(function: Any) -> Iterator[Any]:
    """Yield a function and those inside it: `torch.no_grad()` and `torch.compile` return functions of torch."""
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        function = _find_function(function)
        yield function
        seen.add(id(function))
        # Not `getattr`: a mock has every attribute.
        function = getattr(function, "__dict__", {}).get("__wrapped__")


@functools.cache
def _list_vendor_libraries() -> frozenset[str]:
    """Return the top-level names of the libraries of accelerators, which replace functions of torch."""
    sheets = [sheet for backend in load_registry().backends.values() for sheet in backend.sheets]
    return frozenset(module.partition(".")[0] for sheet in sheets for module in sheet.modules)


def find_source(function: Any) -> str:
    """Return the name of the Python module that defines a function or a callable object."""
    function = _find_function(function)
    # By its globals and not by `__module__`: `functools.wraps` copies `__module__` and would hide a patch.
    if isinstance(function, FunctionType):
        return str(function.__globals__.get("__name__"))
    if isinstance(function, _BUILTINS):
        owner = function.__objclass__ if isinstance(function, MethodDescriptorType) else function.__self__
        owner = owner if isinstance(owner, type | ModuleType) else type(owner)
        return str(function.__module__ if getattr(function, "__module__", None) else _read_name(owner))
    return function.__module__ if isinstance(function, type) else type(function).__module__


def _find_function(value: Any) -> Any:
    """Return the function inside a method, descriptor or partial function."""
    while True:
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, classmethod | staticmethod | MethodType):
            value = value.__func__
        elif isinstance(value, functools.partial | functools.partialmethod | functools.cached_property):
            value = value.func
        else:
            return value


def _read_name(owner: Any) -> str:
    return str(owner.__name__ if isinstance(owner, ModuleType) else owner.__module__)
