"""Detection of user code in a model: classes, replaced methods, and patched functions of the libraries that it uses.

A compiled or captured model would skip this code, and it may combine the images of a batch.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch.nn import functional

from anyaccel.backends.registry import load_registry
from anyaccel.forward_overrides import OVERRIDES_KEY, ForwardOverrides
from anyaccel.runtime.speed.module_fingerprint import ENTRY_METHODS, PatchedCode, list_classes, list_code_owners
from anyaccel.upstream.diffusers_internals import ATTENTION_LIBRARIES, read_attention_backends

__all__ = ["find_custom_code", "find_source", "is_library", "is_library_code"]

# Libraries with layers and processors that do the same work at every call.
_MODEL_LIBRARIES = frozenset(("torch", "diffusers", "transformers", "peft", "torchao", "accelerate", "anyaccel"))
# Other libraries that these import functions from, or whose decorators they use. Mocks of unittest are user code.
_IMPORTED_LIBRARIES = (
    _MODEL_LIBRARIES
    | (sys.stdlib_module_names - {"unittest"})
    | {"huggingface_hub", "numpy", "packaging", "PIL", "safetensors", "scipy", "sentencepiece", "tokenizers", "tqdm"}
    | {"triton", "typing_extensions"}
    | ATTENTION_LIBRARIES
)
_BUILTINS = (BuiltinFunctionType, MethodDescriptorType)

# Classes of models without patched code, with their code at the time of the search and the number of names per owner.
_UNPATCHED: dict[frozenset[type], tuple[PatchedCode, list[Any], list[int]]] = {}


def find_custom_code(module: torch.nn.Module) -> str:
    """Return a description of the user code in a module or in the functions that it uses; empty if there is none."""
    for cls in list_classes(module):
        if cls.__module__.partition(".")[0] not in _MODEL_LIBRARIES:
            return cls.__name__
        for name in ENTRY_METHODS:
            function = getattr(cls, name, None)
            if function is not None and not is_library_code(function):
                return f"a patched {cls.__name__}.{name}"
    for layer in module.modules():
        for name, value in vars(layer).items():
            if not callable(value) or isinstance(value, torch.nn.Module | ForwardOverrides) or name == OVERRIDES_KEY:
                continue
            if callable(getattr(type(layer), name, None)) and not is_library_code(value):
                return f"a replaced {name} of {type(layer).__name__}"
    backends = read_attention_backends()
    names = [str(name) for name, function in backends.items() if not is_library_code(function)]
    return f"the attention backend {names[0]}" if names else _find_patched_code(module)


def _find_patched_code(module: torch.nn.Module) -> str:
    """Return a description of a patched function of a class or Python module that a model uses; empty if none."""
    # A search takes some tens of milliseconds, so it is repeated only if a name or value has changed since.
    key = frozenset(list_classes(module))
    if key in _UNPATCHED:
        code, owners, lengths = _UNPATCHED[key]
        if [len(vars(owner)) for owner in owners] == lengths and not code.changed():
            return ""
    owners = [*list_code_owners(key), functional, torch, torch.Tensor]
    lengths = [len(vars(owner)) for owner in owners]
    code = PatchedCode(module, torch, torch.Tensor, constants=True)
    for owner in owners:
        for name, value in list(vars(owner).items()):
            is_special = name.startswith("__") and name != "__call__"
            runs_code = callable(value) or hasattr(type(value), "__get__")
            if not is_special and runs_code and not is_library_code(value):
                return f"a patched {owner.__name__}.{name}"
    _UNPATCHED[key] = code, owners, lengths
    return ""


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
