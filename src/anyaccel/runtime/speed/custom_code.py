"""Detection of user code in a model: classes, replaced methods, and patched functions of the libraries that it uses.

A compiled or captured model would skip this code, and it may combine the images of a batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from anyaccel.forward_overrides import OVERRIDES_KEY, ForwardOverrides
from anyaccel.runtime.library_code import MODEL_LIBRARIES, is_library_code
from anyaccel.runtime.speed.module_fingerprint import ENTRY_METHODS, PatchedCode, list_classes, list_code_owners
from anyaccel.upstream.diffusers_internals import read_attention_backends

__all__ = ["find_custom_code"]

# Classes of models without patched code, with their code at the time of the search and the number of names per owner.
_UNPATCHED: dict[frozenset[type], tuple[PatchedCode, list[Any], list[int]]] = {}


def find_custom_code(module: torch.nn.Module) -> str:
    """Return a description of the user code in a module or in the functions that it uses; empty if there is none."""
    for cls in list_classes(module):
        if cls.__module__.partition(".")[0] not in MODEL_LIBRARIES:
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
