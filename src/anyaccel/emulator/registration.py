"""Registration of a device type with torch, in Python and C++, on a machine without that device.

A name that torch does not know is registered as `PrivateUse1`. A name that torch knows (mps, hpu, xpu) has no
device guard in a build without the device, so a Python device guard is added to the device guard registry in
libc10. Both registrations last until the process ends.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch

from anyaccel.backends.device_type_checks import is_host
from anyaccel.emulator.dispatch import dispatch
from anyaccel.emulator.gradients import make_differentiable
from anyaccel.emulator.torch_patch_registry import apply_patch, replace_by
from anyaccel.errors import RealDeviceError, VirtualDeviceError
from anyaccel.upstream.torch_internals import (
    claim_private_use,
    exclude_dispatch_key,
    find_guard_table,
    has_fallback,
    is_decomposed,
    make_guard,
    read_device_type,
    read_private_use_name,
    register_device_module,
)

__all__ = ["register_device"]

# Name of the `PrivateUse1` device type before a package renames it.
_UNCLAIMED = "privateuseone"
# Operations with device-specific code before dispatch: attention selects a kernel, group_norm a layout.
_DEVICE_SPECIFIC = ("scaled_dot_product_attention", "group_norm")
# Objects that C++ uses without a reference; they must live as long as the process.
_KEEP_ALIVE: list[object] = []


def register_device(name: str, module: ModuleType, undecomposed: Iterable[str] = ()) -> None:
    """Register a device type with torch: its device guard, its `torch.NAME` module and its kernels.

    Composite operations in `undecomposed` are dispatched to the device instead of being decomposed.
    """
    if read_private_use_name() == name:
        raise RealDeviceError(
            f"the package for the real {name} device is already loaded, so a virtual one cannot be added",
            hint=f"use the real {name} device, or an environment without this package",
        )
    if _is_builtin(name):
        key = name.upper()
        _fill_guard_slot(name)
        _attach_module(name, module)
    else:
        key = "PrivateUse1"
        _claim_private_use(name, module)
    library = torch.library.Library("_", "IMPL")
    library.fallback(_run_operation, key)
    kernels = _register_undecomposed(key, {*_DEVICE_SPECIFIC, *undecomposed})
    _KEEP_ALIVE.extend([library, kernels, *_register_autocast(key)])


def _run_operation(func: Any, *args: Any, **kwargs: Any) -> Any:
    # Only calls without a virtual tensor arrive here (factories); the others go through __torch_dispatch__.
    return dispatch(func, args, kwargs)


def _register_undecomposed(key: str, names: set[str]) -> torch.library.Library:
    """Register kernels for composite operations, so that they are dispatched without being decomposed."""
    library = torch.library.Library("aten", "IMPL")
    for name in sorted(names):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            func = getattr(packet, overload)
            if is_decomposed(func):
                library.impl(func, functools.partial(_run_operation, func), key)
                library.impl(func, make_differentiable(func), f"Autograd{key}")
    return library


# Operations that autocast runs in lower precision on other devices.
_LOW_PRECISION = (
    "mm.default", "bmm.default", "addmm.default", "baddbmm.default", "matmul.default", "linear.default",
    "conv1d.default", "conv2d.default", "conv3d.default", "conv_transpose1d.default", "conv_transpose2d.input",
    "conv_transpose3d.input", "scaled_dot_product_attention.default",
)  # fmt: skip


def _register_autocast(key: str) -> list[torch.library.Library]:
    """Register `torch.autocast` kernels for the device type.

    Inputs to matrix products, convolutions and attention are cast; other operations fall through.
    """
    if has_fallback(f"Autocast{key}"):
        return []
    fallthrough = torch.library.Library("_", "IMPL")
    fallthrough.fallback(torch.library.fallthrough_kernel, f"Autocast{key}")
    casting = torch.library.Library("aten", "IMPL")
    for name in _LOW_PRECISION:
        packet, overload = name.split(".")
        func = getattr(getattr(torch.ops.aten, packet), overload)
        casting.impl(func, _make_cast(func, f"Autocast{key}"), f"Autocast{key}")
    return [fallthrough, casting]


def _make_cast(func: Any, key: str) -> Any:
    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and not is_host(value.device):
            return value.to(torch.get_autocast_dtype(value.device.type))
        return value

    def run(*args: Any, **kwargs: Any) -> Any:
        with exclude_dispatch_key(key):  # or this kernel would call itself
            return func(*[cast(value) for value in args], **{name: cast(value) for name, value in kwargs.items()})

    return run


def _is_builtin(name: str) -> bool:
    """Return whether torch has a built-in device type with the given name, such as `hpu`."""
    return read_device_type(name.upper()) is not None


def _claim_private_use(name: str, module: ModuleType) -> None:
    current = read_private_use_name()
    if current != _UNCLAIMED:
        raise VirtualDeviceError(
            f"torch supports only one custom device type per process, and {current!r} is already registered",
            hint=f"use an environment without the package that registers {current!r}, or a separate process",
        )
    claim_private_use(name, module)
    _make_importable(name, module)


def _attach_module(name: str, module: ModuleType) -> None:
    """Install the module as `torch.NAME`, or copy its functions into an existing module of that name."""
    existing = getattr(torch, name, None)
    if existing is None:
        register_device_module(name, module)
        _make_importable(name, module)
        return
    for attribute, value in vars(module).items():
        # torch reads its own `_is_compiled` to decide which C++ bindings exist: it must stay False.
        if not attribute.startswith("__") and attribute != "_is_compiled":
            apply_patch(f"torch.{name}.{attribute}", replace_by(value), "emulator")


def _make_importable(name: str, module: ModuleType) -> None:
    sys.modules[f"torch.{name}"] = module


def _fill_guard_slot(name: str) -> None:
    """Register a Python device guard for a built-in device type in libc10's device guard registry."""
    kind = read_device_type(name.upper())
    slot, private_use = int(kind), int(read_device_type("PrivateUse1"))
    table = find_guard_table(private_use + 1)
    if table[slot] is not None:
        raise RealDeviceError(
            f"this torch build supports real {name} devices, so a virtual one cannot be added",
            hint=f"use the real {name} device, or a torch build without {name} support",
        )
    # torch.acc registers Python guards only for PrivateUse1: register there, copy the entry, restore the slot.
    before = table[private_use]
    guard = make_guard(kind)
    table[slot] = table[private_use]
    table[private_use] = before
    _KEEP_ALIVE.append(guard)
