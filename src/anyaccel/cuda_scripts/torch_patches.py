"""Spellings that torch's function seam does not see: generators, autocast, default devices, files, compilers."""

from __future__ import annotations

import functools
from typing import Any

import torch

from anyaccel.backends.device import find_device
from anyaccel.backends.device_functions import adjust_dtype
from anyaccel.cuda_scripts.migration import Migration
from anyaccel.emulator.torch_patches import apply_patch, replace_class

__all__ = ["install_torch_patches"]

_FOR_ANY_DEVICE = ("inductor", "cudagraphs", None)
"""Compilers that a script names, or leaves to torch, without a device of its own in mind."""


def install_torch_patches(migration: Migration) -> None:
    """Apply the patches of these; they stay until the process ends."""
    apply_patch("torch.Generator", lambda original: _draw_on_host(original, migration), "scripts")
    _change_first_argument("torch.amp.autocast_mode.autocast", "device_type", migration)
    _change_first_argument("torch.amp.grad_scaler.GradScaler", "device", migration)
    _change_first_argument("torch.utils._device.DeviceContext", "device", migration, whole=True)
    apply_patch("torch.load", lambda load: _change_loading(load, migration), "scripts")
    apply_patch("torch.compile", lambda compile_there: _change_compiling(compile_there, migration), "scripts")


def _draw_on_host(original: Any, migration: Migration) -> Any:
    """`torch.Generator("cuda")` is a generator of the host: one seed gives one noise on every device."""

    def build(device: Any = "cpu") -> Any:
        migration.translate(device, "Generator")
        return original("cpu")

    return replace_class(original, build)


def _change_first_argument(kind: str, name: str, migration: Migration, whole: bool = False) -> None:
    """A class whose first argument is a device, or the kind of one, and perhaps a number type."""
    asked = kind.rpartition(".")[2]

    def change(make: Any) -> Any:
        @functools.wraps(make)
        def make_here(self: Any, *args: Any, **kwargs: Any) -> None:
            given = args[0] if args else kwargs.pop(name, migration.foreign)
            meant = migration.translate(given, asked)
            if meant is not given and isinstance(kwargs.get("dtype"), torch.dtype):
                kwargs["dtype"] = adjust_dtype(kwargs["dtype"], str(meant))
            make(self, meant.type if isinstance(meant, torch.device) and not whole else meant, *args[1:], **kwargs)

        return make_here

    apply_patch(f"{kind}.__init__", change, "scripts")


def _change_loading(load: Any, migration: Migration) -> Any:
    """`torch.load(…, map_location=…)`; what was saved on CUDA and says nothing goes to the device too."""

    @functools.wraps(load)
    def load_here(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(map_location, dict):
            map_location = {source: str(migration.translate(target, "load")) for source, target in map_location.items()}
        elif map_location is not None:
            map_location = migration.translate(map_location, "load")
        return load(f, map_location, *args, **kwargs)

    return load_here


def _change_compiling(compile_there: Any, migration: Migration) -> Any:
    """`torch.compile`: with the device's own compiler, as its sheet says."""
    rule = migration.make_plan().compiler.value

    @functools.wraps(compile_there)
    def compile_here(model: Any = None, **options: Any) -> Any:
        if options.get("backend") not in _FOR_ANY_DEVICE:
            return compile_there(model, **options)
        if model is None:
            return lambda function: compile_here(function, **options)
        refusal = _refuse_compiling(rule.backend, migration)
        if refusal:
            migration.note(refusal)
            return model
        changed = {name: value for name, value in options.items() if name not in ("mode", "options", "backend")}
        if rule.static:
            changed["dynamic"] = False
        migration.record(f"compile, by {rule.backend}")
        return compile_there(model, backend=rule.backend, **changed)

    return compile_here


def _refuse_compiling(backend: str, migration: Migration) -> str:
    """Why nothing is compiled here; empty where it is."""
    if not backend:
        return "compile is left out: no compiler is known for this device"
    if backend in _FOR_ANY_DEVICE and find_device(migration.opened.sheet.name).virtual:
        return "compile is left out: torch's own compiler makes no code for a virtual device"
    return ""
