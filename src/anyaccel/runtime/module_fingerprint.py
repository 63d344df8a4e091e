"""Module fingerprints, which detect changes after compilation or graph capture.

A fingerprint covers everything that a replay would miss: the addresses of weights, all attributes of all layers and
attention processors, hooks, adapters, and patched functions of classes and modules. A comparison takes a few
milliseconds for a large model.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import eq, is_
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any

import torch
from torch.nn import functional

from anyaccel.backends.device_type_checks import is_host
from anyaccel.forward_overrides import OVERRIDES_KEY, ForwardOverrides, find_replaced_forward
from anyaccel.upstream import accelerate_internals, diffusers_internals
from anyaccel.upstream.torch_internals import (
    CONVOLUTION_FORWARD,
    FORWARD_HOOK_TABLES,
    WEIGHT_TABLES,
    read_child_table,
    read_global_hooks,
    read_hook_tables,
)

__all__ = [
    "ENTRY_METHODS",
    "LayerHooks",
    "ModuleFingerprint",
    "PatchedCode",
    "is_in_training",
    "is_random_adapter",
    "list_classes",
    "list_code_owners",
]

ENTRY_METHODS = ("forward", "__call__", CONVOLUTION_FORWARD)
# Attributes of a layer that contain an object with attributes of its own: attention processors, and the configs of
# transformers models.
_OWNED_OBJECTS = ("processor", "config")
_CODE = (FunctionType, BuiltinFunctionType, MethodDescriptorType, classmethod, staticmethod, property)
# Libraries whose functions call functions of their other modules.
_FOLLOWED_LIBRARIES = frozenset(("diffusers", "peft"))
# Layers of torch, and those of peft for LoRA, work the same way in training mode, except for these.
_LAYER_LIBRARIES = frozenset(("torch", "peft", "anyaccel"))
_DROPOUTS = (torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d, torch.nn.AlphaDropout,
             torch.nn.FeatureAlphaDropout)  # fmt: skip
_OTHERS_WITH_TRAINING_MODE = (
    torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm, torch.nn.InstanceNorm1d,
    torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d, torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer,
    torch.nn.TransformerDecoderLayer, torch.nn.RReLU, torch.nn.RNNBase,
)  # fmt: skip


def is_in_training(module: torch.nn.Module) -> bool:
    """Return whether a layer of a module is in training mode and may therefore work differently."""
    return any(layer.training and _depends_on_training(layer) for layer in module.modules())


def _depends_on_training(layer: torch.nn.Module) -> bool:
    # New layers are in training mode, and peft leaves those of adapters in it.
    if isinstance(layer, _DROPOUTS):
        return layer.p > 0
    library = type(layer).__module__.partition(".")[0]
    is_other = isinstance(layer, _OTHERS_WITH_TRAINING_MODE) or is_random_adapter(layer)
    return is_other or library not in _LAYER_LIBRARIES


def is_random_adapter(layer: torch.nn.Module) -> bool:
    """Return whether a layer is an adapter of peft that may draw random numbers in training mode.

    LoHa and LoKr layers draw a number for each call, also without dropout (peft 0.21, tuners/loha/layer.py).
    """
    name = type(layer).__module__
    return name.startswith("peft.tuners.") and not name.startswith("peft.tuners.lora.")


class LayerHooks:
    """Hooks that affect a module: hooks on its layers, torch's global hooks, and hooks of other libraries."""

    def __init__(self, module: torch.nn.Module) -> None:
        layers = [layer for layer in module.modules() if layer is not module]
        tables = [table for layer in layers for table in read_hook_tables(layer)]
        # torch fills these tables in place, so an emptiness check per call is enough to notice a new hook.
        self._tables = [*tables, *read_global_hooks()]
        self._module = weakref.ref(module)  # weak: the module holds this object
        self._layers = [layer.__dict__ for layer in layers]
        self._child_tables = [read_child_table(layer) for layer in module.modules()]
        self._children = [list(table.values()) for table in self._child_tables]

    def any(self) -> bool:
        """Return whether a layer has a hook, or a global hook is registered."""
        return any(self._tables)

    def has_foreign_forward(self) -> bool:
        """Return whether another library has replaced the forward of the module or of one of its layers."""
        module = self._module()
        if module is None:
            return False
        return find_replaced_forward(module) is not None or any(
            accelerate_internals.has_hook(layer) or diffusers_internals.has_hook(layer)
            for layer in (vars(module), *self._layers)
        )

    def covers_all_layers(self) -> bool:
        """Return whether the module's layers are unchanged; an adapter may have replaced some of them."""
        return all(map(eq, map(list, map(dict.values, self._child_tables)), self._children))


class PatchedCode:
    """A snapshot of the functions that a module uses, to detect monkey patches.

    With `constants`, it also includes all other global names and class attributes that these functions may read.
    """

    def __init__(self, module: torch.nn.Module, *others: Any, constants: bool = False) -> None:
        self._classes = list_classes(module)
        namespaces = map(vars, list_code_owners(self._classes))
        self._values = [
            *(_read_values(namespace, code_only=not constants) for namespace in namespaces),
            *(_read_values(vars(owner), code_only=True) for owner in (functional, *others)),
        ]
        self._entry_methods = list(self._read_entry_methods())

    def changed(self) -> bool:
        """Return whether any value in the snapshot has been replaced."""
        if not all(all(map(is_, map(namespace.get, names), values)) for namespace, names, values in self._values):
            return True
        return not _are_same(list(self._read_entry_methods()), self._entry_methods)

    def _read_entry_methods(self) -> Iterator[Any]:
        """Yield the methods that run each layer class, such as `forward`, including inherited methods."""
        return (getattr(cls, name, None) for cls in self._classes for name in ENTRY_METHODS)


def _read_values(namespace: Any, *, code_only: bool) -> tuple[Any, list[str], list[Any]]:
    """Return a namespace with the names and values in it that the code of a model may use."""
    pairs = [
        (name, value)
        for name, value in namespace.items()
        # Dynamo itself patches `Module.__init__` and `__setstate__` when it first compiles (torch 2.11 to 2.13).
        if (name == "__call__" or not name.startswith("__")) and (isinstance(value, _CODE) or not code_only)
    ]
    return namespace, [name for name, _ in pairs], [value for _, value in pairs]


def list_code_owners(classes: Iterable[type]) -> list[Any]:
    """Return the classes and Python modules with the functions that some classes use.

    These are the classes and their bases, their modules, and the modules and classes that the functions in there come
    from. Of torch, only the modules of the classes are included: its other functions are called through `torch` and
    `torch.nn.functional`.
    """
    bases = {base for cls in classes for base in cls.__mro__ if base is not object}
    pending, modules = list({base.__module__ for base in bases} & sys.modules.keys()), dict[str, Any]()
    while pending:
        name = pending.pop()
        if name in modules:
            continue
        modules[name] = sys.modules[name]
        for value in vars(modules[name]).values():
            source = getattr(value, "__module__", None) if isinstance(value, FunctionType | type) else None
            if isinstance(source, str) and source in sys.modules and source.partition(".")[0] in _FOLLOWED_LIBRARIES:
                pending.append(source)
    defined = {
        value
        for name, module in modules.items()
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == name
    }
    return [*bases, *modules.values(), *defined]


def list_classes(module: torch.nn.Module) -> list[type]:
    """Return the classes of a module's layers and attention processors."""
    processors = (vars(layer).get("processor") for layer in module.modules())
    return list(dict.fromkeys(map(type, chain(module.modules(), filter(None, processors)))))


class ModuleFingerprint:
    """A snapshot of a module's weights, attributes, hooks and code, used to detect later changes."""

    def __init__(self, module: torch.nn.Module) -> None:
        # Weak, because the module holds this object: a cycle would keep its weights until a garbage collection.
        self._module = weakref.ref(module)
        self._inner_layers = [layer.__dict__ for layer in module.modules() if layer is not module]
        self._code = PatchedCode(module, torch, torch.Tensor, constants=True)
        self._modules = [weakref.ref(layer) for layer in module.modules()]
        self._types = list(self._read_types())
        layers = list(self._read_layers())
        owners = [layer.get(name) for layer in layers for name in _OWNED_OBJECTS]
        processors = [vars(owner) for owner in owners if hasattr(owner, "__dict__")]
        attributes = [pair for owner in (*layers, *processors) for pair in owner.items()]
        self._lists = [value for _, value in attributes if type(value) is list]
        tables = [
            value
            for name, value in attributes
            if (type(value) is dict and name not in WEIGHT_TABLES) or name in FORWARD_HOOK_TABLES
        ]
        self._dicts = [*processors, *tables]
        self._weights = [layer[name] for layer in layers for name in WEIGHT_TABLES]
        self._attributes = list(self._read_attributes())
        # Weak references to tensors: a fingerprint must not keep replaced weights in memory.
        self._items = [weakref.ref(item) if isinstance(item, torch.Tensor) else item for item in self._read_items()]
        plain_tensors = chain((value for _, value in attributes), self._read_items())
        self._tensors = [weakref.ref(value) for value in plain_tensors if isinstance(value, torch.Tensor)]
        self._addresses = list(self._read_addresses())
        self._lengths = self._read_lengths()

    def holds(self) -> bool:
        """Return whether the module is unchanged since the snapshot."""
        return (
            self._read_lengths() == self._lengths
            and all(map(is_, self._read_types(), self._types))
            and all(map(is_, self._read_attributes(), self._attributes))
            and not self._code.changed()
            and all(map(_is_same_item, self._read_items(), self._items))
            and self.holds_memory()
        )

    def holds_memory(self) -> bool:
        """Return whether all tensors that existed at the snapshot still use the same memory."""
        return list(self._read_addresses()) == self._addresses

    def _read_layers(self) -> Iterator[dict[str, Any]]:
        """Yield the `__dict__` of the module and of every layer; yield nothing if the module was deleted."""
        module = self._module()
        return iter(()) if module is None else chain([vars(module)], self._inner_layers)

    def _read_lengths(self) -> list[int]:
        # Compared first, because `map` stops at the shorter sequence.
        tensor = vars(torch.Tensor)  # inherits most methods, so a patch adds an entry
        return [len(owner) for owner in chain([tensor], self._read_layers(), self._dicts, self._lists, self._weights)]

    def _read_types(self) -> Iterator[type]:
        return (type(module()) for module in self._modules)

    def _read_attributes(self) -> Iterator[Any]:
        return chain.from_iterable(
            _without_overrides(layer) if OVERRIDES_KEY in layer or "forward" in layer else layer.values()
            for layer in self._read_layers()
        )

    def _read_items(self) -> Iterator[Any]:
        """Yield the items of lists and dicts that can change in place, such as hooks and adapter scales."""
        return chain(chain.from_iterable(table.values() for table in self._dicts), *self._lists)

    def _read_addresses(self) -> Iterator[Any]:
        weights = chain.from_iterable(table.values() for table in self._weights)
        return map(_describe_memory, filter(_is_present, chain(weights, (tensor() for tensor in self._tensors))))


def _without_overrides(layer: dict[str, Any]) -> Iterator[Any]:
    """Yield a layer's attributes, replacing anyaccel's `forward` override with the forward it wraps."""
    for name, value in layer.items():
        if name == OVERRIDES_KEY:
            continue
        if name != "forward" or not isinstance(value, ForwardOverrides):
            yield value
        elif value.beneath is not None:
            yield value.beneath


def _is_present(value: Any) -> bool:
    return value is not None


def _describe_memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the address and strides of a tensor, and the value of a CPU scalar."""
    # A captured graph contains the value of a CPU scalar as a constant.
    value = tensor.item() if tensor.dim() == 0 and is_host(tensor.device) else None
    return tensor.data_ptr(), tensor.stride(), value


def _are_same(current: list[Any], stored: list[Any]) -> bool:
    return len(current) == len(stored) and all(map(is_, current, stored))


def _is_same_item(current: Any, stored: Any) -> bool:
    return current is stored or (type(stored) is weakref.ref and stored() is current)
