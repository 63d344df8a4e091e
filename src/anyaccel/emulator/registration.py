"""Make a device's name real to torch, to Python and to C++ alike, on a machine that has no such device.

A name that torch does not know becomes its `PrivateUse1`. A name that it knows (mps, hpu, xpu) has no device guard in
a build without it: a guard written in Python is put in its slot of libc10's table. Both last until the process ends.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch

from anyaccel.backends.torch_device import is_host
from anyaccel.emulator.dispatch import dispatch
from anyaccel.emulator.torch_patches import apply_patch, replace_by
from anyaccel.errors import RealDeviceError, VirtualDeviceError
from anyaccel.upstream.torch_internals import (
    claim_private_use,
    exclude_dispatch_key,
    find_guard_table,
    has_fallback,
    is_decomposed,
    make_guard,
    read_device_kind,
    read_private_use_name,
    register_device_module,
)

__all__ = ["register_device"]

_FREE = "privateuseone"
_BY_DEVICE = ("scaled_dot_product_attention", "group_norm")
"""Operations that torch prepares by device before it dispatches: attention picks a kernel, group_norm a layout."""
_KEPT: list[object] = []
"""What C++ holds no reference to and must live as long as the process."""


def register_device(name: str, module: ModuleType, whole: Iterable[str] = ()) -> None:
    """Teach torch a device: its guard, its module `torch.NAME`, and what to do with an operation on it.

    Operations in `whole` arrive as they were called, where torch would take them apart before.
    """
    if read_private_use_name() == name:
        raise RealDeviceError(
            f"the software of real {name} devices is loaded already", hint=f"use {name}, or an environment without it"
        )
    if _is_known(name):
        key = name.upper()
        _fill_guard_slot(name)
        _attach_module(name, module)
    else:
        key = "PrivateUse1"
        _claim_private_use(name, module)
    library = torch.library.Library("_", "IMPL")
    library.fallback(_run_factory, key)
    _KEPT.extend([library, _keep_whole(key, {*_BY_DEVICE, *whole}), *_pass_autocast(key)])


def _run_factory(func: Any, *args: Any, **kwargs: Any) -> Any:
    return dispatch(func, args, kwargs)


def _keep_whole(key: str, names: set[str]) -> torch.library.Library:
    """Give operations that torch takes apart a kernel here, so that they arrive as they were called."""
    library = torch.library.Library("aten", "IMPL")
    for name in sorted(names):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            func = getattr(packet, overload)
            if is_decomposed(func):
                library.impl(func, functools.partial(_run_factory, func), key)
    return library


_LOWERED = (
    "mm.default", "bmm.default", "addmm.default", "baddbmm.default", "matmul.default", "linear.default",
    "conv1d.default", "conv2d.default", "conv3d.default", "conv_transpose1d.default", "conv_transpose2d.input",
    "conv_transpose3d.input", "scaled_dot_product_attention.default",
)  # fmt: skip
"""The operations that autocast runs in the lower type, as on other devices."""


def _pass_autocast(key: str) -> list[torch.library.Library]:
    """`torch.autocast` on the device: products are cast, everything else goes through."""
    if has_fallback(f"Autocast{key}"):
        return []
    through = torch.library.Library("_", "IMPL")
    through.fallback(torch.library.fallthrough_kernel, f"Autocast{key}")
    casting = torch.library.Library("aten", "IMPL")
    for name in _LOWERED:
        packet, overload = name.split(".")
        func = getattr(getattr(torch.ops.aten, packet), overload)
        casting.impl(func, _make_cast(func, f"Autocast{key}"), f"Autocast{key}")
    return [through, casting]


def _make_cast(func: Any, key: str) -> Any:
    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and not is_host(value.device):
            return value.to(torch.get_autocast_dtype(value.device.type))
        return value

    def run(*args: Any, **kwargs: Any) -> Any:
        with exclude_dispatch_key(key):
            return func(*[cast(value) for value in args], **{name: cast(value) for name, value in kwargs.items()})

    return run


def _is_known(name: str) -> bool:
    """Whether this torch has the name of its own, as a device type that is not the free one."""
    return read_device_kind(name.upper()) is not None


def _claim_private_use(name: str, module: ModuleType) -> None:
    taken = read_private_use_name()
    if taken != _FREE:
        raise VirtualDeviceError(
            f"torch has one free slot for a device's name, and {taken!r} holds it already",
            hint=f"use an environment without the package that brings {taken!r}, or a process of its own",
        )
    claim_private_use(name, module)
    _make_importable(name, module)


def _attach_module(name: str, module: ModuleType) -> None:
    """Put the stand-in's functions into `torch.NAME`, which torch may have already."""
    existing = getattr(torch, name, None)
    if existing is None:
        register_device_module(name, module)
        _make_importable(name, module)
        return
    for attribute, value in vars(module).items():
        # A module of torch's own knows whether it was compiled, and what else in torch was left out if it was not.
        if not attribute.startswith("__") and attribute != "_is_compiled":
            apply_patch(f"torch.{name}.{attribute}", replace_by(value), "emulator")


def _make_importable(name: str, module: ModuleType) -> None:
    sys.modules[f"torch.{name}"] = module


def _fill_guard_slot(name: str) -> None:
    """Copy a guard written in Python to the device's slot: C++ asks that table before it touches a device."""
    kind = read_device_kind(name.upper())
    slot, private_use = int(kind), int(read_device_kind("PrivateUse1"))
    table = find_guard_table(private_use + 1)
    if table[slot] is not None:
        raise RealDeviceError(
            f"this torch drives real {name} devices, and a virtual one cannot stand beside them",
            hint=f"use {name} itself, or a build of torch without it",
        )
    before = table[private_use]
    guard = make_guard(kind)
    table[slot] = table[private_use]
    table[private_use] = before
    _KEPT.append(guard)
