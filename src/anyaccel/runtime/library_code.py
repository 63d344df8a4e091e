"""Known libraries: functions, classes and objects that are not from one of them are the user's own.

Code of the user must run as often as in diffusers: with counters, logs or random numbers in it, another number of calls
is visible. A call with such code is therefore not traced, and a model with such code is not captured or split.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch.nn import functional

from anyaccel.backends.registry import load_registry
from anyaccel.forward_overrides import OVERRIDES_KEY, ForwardOverrides
from anyaccel.runtime.introspection import plain_class
from anyaccel.runtime.module_fingerprint import ENTRY_METHODS, PatchedCode, list_classes, list_code_owners
from anyaccel.upstream.diffusers_internals import ATTENTION_LIBRARIES, read_attention_backends
from anyaccel.upstream.torch_internals import (
    MODULE_HOOKS,
    DeviceContext,
    read_dispatch_modes,
    read_function_modes,
    read_global_hooks,
)
from anyaccel.upstream.transformers_internals import read_attention_functions

__all__ = ["find_source", "find_user_code_in_call", "find_user_code_in_model", "is_library", "is_library_code"]

_OWN_LIBRARY = __name__.partition(".")[0]
# Libraries with layers and processors that do the same work at every call.
_MODEL_LIBRARIES = frozenset(("torch", "diffusers", "transformers", "peft", "torchao", "accelerate", _OWN_LIBRARY))
# Other libraries that these import functions from, or whose decorators they use. Mocks of unittest are user code.
_IMPORTED_LIBRARIES = (
    _MODEL_LIBRARIES
    | (sys.stdlib_module_names - {"unittest"})
    | {"huggingface_hub", "numpy", "packaging", "PIL", "safetensors", "scipy", "sentencepiece", "tokenizers", "tqdm"}
    | {"triton", "typing_extensions"}
    # Libraries whose quantized layers diffusers and transformers load.
    | {"bitsandbytes", "gguf", "optimum"}
    | ATTENTION_LIBRARIES
)
# Libraries with objects whose attributes are searched too.
_SEARCHED_LIBRARIES = ("diffusers", "transformers")
# Names of functions that Dynamo adds to the modules of compiled functions, for its own use.
_DYNAMO_NAMES = ("__compiled_fn_", "__resume_at_", "__import_")
# Attributes of a Python module that its importer sets: pytest imports packages with plugins through its own.
_IMPORTER_NAMES = ("__loader__", "__spec__")
_BUILTINS = (BuiltinFunctionType, MethodDescriptorType)
_METHODS = (classmethod, staticmethod, MethodType)
_WRAPPERS = (property, *_METHODS, functools.partial, functools.partialmethod, functools.cached_property)
# Attributes that the copy of a layer on `meta` does not have.
_NOT_COPIED = frozenset((*MODULE_HOOKS, OVERRIDES_KEY, "forward"))
# Classes of models without patched code, with their code at the time of the search and the number of names per owner.
_UNPATCHED: dict[frozenset[type], tuple[PatchedCode, list[Any], list[int]]] = {}


@functools.cache
def is_library(source: str) -> bool:
    """Return whether a Python module belongs to a known library."""
    library = source.partition(".")[0]
    return library in _IMPORTED_LIBRARIES or library in _list_vendor_libraries()


@functools.cache
def _list_vendor_libraries() -> frozenset[str]:
    """Return the top-level names of the libraries of accelerators, which replace functions of torch."""
    sheets = [sheet for backend in load_registry().backends.values() for sheet in backend.sheets]
    return frozenset(module.partition(".")[0] for sheet in sheets for module in sheet.modules)


def is_library_code(value: Any) -> bool:
    """Return whether a function or class, or the class of another object, comes from a known library.

    All functions that a decorator, descriptor or partial function contains must come from known libraries too.
    """
    layers = [value]
    for layer in layers:
        if not is_library(_read_source(layer)):
            return False
        inner = _list_inner_functions(layer)
        # `torch.no_grad()` and `torch.compile` return functions of torch. Not `getattr`: a mock has every attribute.
        wrapped = getattr(layer, "__dict__", {}).get("__wrapped__")
        if inner or wrapped is not None:
            layers += [function for function in (*inner, wrapped) if all(function is not known for known in layers)]
    return True


def find_source(function: Any) -> str:
    """Return the name of the Python module that defines a function or a callable object."""
    inner = _list_inner_functions(function)
    return find_source(inner[0]) if inner else _read_source(function)


def _list_inner_functions(value: Any) -> list[Any]:
    """Return the functions inside a method, descriptor or partial function."""
    kind = type(value)  # not isinstance, which runs the code of classes with a `__class__` property
    if not issubclass(kind, _WRAPPERS):
        return []
    if issubclass(kind, property):
        return [function for function in (value.fget, value.fset) if function is not None]
    return [value.__func__ if issubclass(kind, _METHODS) else value.func]


def _read_source(value: Any) -> str:
    """Return the name of the Python module that defines a function or class, or the class of another object."""
    kind = type(value)
    # By its globals and not by `__module__`: `functools.wraps` copies `__module__` and would hide a patch.
    if kind is FunctionType:
        return str(value.__globals__.get("__name__"))
    if kind in _BUILTINS:
        owner = value.__objclass__ if kind is MethodDescriptorType else value.__self__
        owner = owner if issubclass(type(owner), type | ModuleType) else type(owner)
        return str(getattr(value, "__module__", None) or _read_name(owner))
    return str(value.__module__ if issubclass(kind, type) else kind.__module__)


def _read_name(owner: Any) -> str:
    return str(owner.__name__ if isinstance(owner, ModuleType) else owner.__module__)


def find_user_code_in_call(pipe: Any, arguments: Mapping[str, Any]) -> str:
    """Return a description of user code that a call on `meta` would run; empty if there is none."""
    return next(_list_user_code(pipe, arguments), "")


def _list_user_code(pipe: Any, arguments: Mapping[str, Any]) -> Iterator[str]:
    # Modes of torch too: FlopCounterMode would count the operations of the trace.
    modes = (mode for mode in (*read_function_modes(), *read_dispatch_modes()) if type(mode) is not DeviceContext)
    yield from (type(mode).__name__ for mode in modes if type(mode).__module__.partition(".")[0] != _OWN_LIBRARY)
    yield from ("a global hook" for table in read_global_hooks() if not all(map(_is_library_value, table.values())))
    yield from (f"the argument {name}" for name, value in arguments.items() if not _is_library_value(value))
    classes: set[type] = {torch.Tensor}
    for owner in _list_objects(pipe):
        kind = plain_class(owner)
        classes.update(kind.__mro__)
        for name, value in list(vars(owner).items()):
            if name not in _NOT_COPIED and not all(map(is_library_code, (value, *_list_items(value)))):
                yield f"{kind.__name__}.{name}"
    for cls in classes:
        if not is_library(cls.__module__):
            yield cls.__name__
        yield from _list_patches(cls)
    functions = (*read_attention_backends().values(), *read_attention_functions().values())
    yield from ("an attention function" for function in functions if not is_library_code(function))
    names = {name for name in list(sys.modules) if name.startswith("diffusers.")} | {cls.__module__ for cls in classes}
    for module in (torch, functional, *(sys.modules.get(name) for name in sorted(names))):
        if isinstance(module, ModuleType):
            yield from _list_patches(module)


def _list_objects(pipe: Any) -> Iterator[Any]:
    """Yield a pipeline, its nested pipelines and components, their layers and processors, and objects in them."""
    seen: set[int] = set()
    pending = [pipe, *pipe.components.values()]
    while pending:
        owner = pending.pop()
        if id(owner) in seen or not hasattr(owner, "__dict__"):
            continue
        seen.add(id(owner))
        yield owner
        if isinstance(owner, torch.nn.Module):
            pending.extend(owner.children())
        for name, value in list(vars(owner).items()):
            if name not in _NOT_COPIED:
                # The blocks of modular pipelines are in a dict.
                pending.extend(entry for entry in (value, *_list_items(value)) if _is_searched(entry))


def _is_searched(value: Any) -> bool:
    kind = type(value)
    return kind is not FunctionType and kind.__module__.partition(".")[0] in _SEARCHED_LIBRARIES


def _is_library_value(value: Any) -> bool:
    """Return whether an argument, and everything in it, comes from a library."""
    return is_library_code(value) and all(map(_is_library_value, _list_items(value)))


def _list_items(value: Any) -> list[Any]:
    """Return the values in a dict, list, tuple or set; return an empty list for another object."""
    kind = type(value)
    if issubclass(kind, dict):
        return list(dict.values(value))  # not `value.values()`: a class of the user may override it
    for base in (list, tuple, set):
        if issubclass(kind, base):
            return list(base.__iter__(value))
    return []


def find_user_code_in_model(module: torch.nn.Module) -> str:
    """Return a description of the user code in a module or in the functions that it uses; empty if there is none."""
    for cls in list_classes(module):
        if cls.__module__.partition(".")[0] not in _MODEL_LIBRARIES:
            return cls.__name__
        for name in ENTRY_METHODS:
            if not is_library_code(getattr(cls, name, None)):
                return f"a patched {cls.__name__}.{name}"
    for layer in module.modules():
        for name, value in vars(layer).items():
            if not callable(value) or isinstance(value, torch.nn.Module | ForwardOverrides) or name == OVERRIDES_KEY:
                continue
            if not is_library_code(value):  # also of an attribute like `nonlinearity`, which holds a function
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
        patch = next(_list_patches(owner, code_only=True), "")
        if patch:
            return patch
    _UNPATCHED[key] = code, owners, lengths
    return ""


def _list_patches(owner: Any, *, code_only: bool = False) -> Iterator[str]:
    """Yield descriptions of the values in a class or Python module that come from the user.

    With `code_only`, do not include special methods other than `__call__`.
    """
    for name, value in list(vars(owner).items()):
        if (code_only and name.startswith("__") and name != "__call__") or name.startswith(_DYNAMO_NAMES):
            continue
        if name in _IMPORTER_NAMES:
            continue
        if not is_library_code(value) or _is_users_module(value):
            yield f"a patched {owner.__name__}.{name}"


def _is_users_module(value: Any) -> bool:
    """Return whether a value is a Python module that is neither part of Python nor installed with pip."""
    if not isinstance(value, ModuleType) or is_library(value.__name__):
        return False
    parts = Path(getattr(value, "__file__", None) or "").parts
    return not {"site-packages", "dist-packages"}.intersection(parts)
