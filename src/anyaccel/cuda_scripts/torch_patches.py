"""Patches for torch APIs that bypass `__torch_function__`, such as `torch.Generator` and `torch.load`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from anyaccel.backends.device import find_device
from anyaccel.backends.device_functions import adjust_dtype
from anyaccel.cuda_scripts.migration import Migration
from anyaccel.emulator.torch_patch_registry import apply_patch, replace_class

__all__ = ["install_torch_patches"]

# Backends that a script uses without a specific device in mind; they are replaced by the device's own.
_GENERIC_BACKENDS = ("inductor", "cudagraphs", None)


def install_torch_patches(migration: Migration) -> None:
    """Apply the patches that map `cuda` to the target device; they remain in effect until the process ends."""
    apply_patch("torch.Generator", lambda original: _use_cpu_generator(original, migration), "scripts")
    _translate_first_argument("torch.amp.autocast_mode.autocast", "device_type", migration)
    _translate_first_argument("torch.amp.grad_scaler.GradScaler", "device", migration)
    # DeviceContext implements `with torch.device(...)` and torch.set_default_device.
    _translate_first_argument("torch.utils._device.DeviceContext", "device", migration, with_index=True)
    apply_patch("torch.load", lambda load: _translate_map_location(load, migration), "scripts")
    apply_patch("torch.compile", lambda original: _choose_backend(original, migration), "scripts")


def _use_cpu_generator(original: Any, migration: Migration) -> Any:
    """Return a `torch.Generator` replacement that always creates CPU generators.

    A seed then produces the same noise on every device.
    """

    def build(device: Any = "cpu") -> Any:
        migration.translate(device, "Generator")
        return original("cpu")

    return replace_class(original, build)


def _translate_first_argument(class_name: str, name: str, migration: Migration, with_index: bool = False) -> None:
    """Patch a constructor so that it maps the device or device type in its first argument.

    A `dtype` argument is replaced if the actual device does not support it.
    """
    call = class_name.rpartition(".")[2]

    def change(initialize: Any) -> Any:
        @functools.wraps(initialize)
        def initialize_mapped(self: Any, *args: Any, **kwargs: Any) -> None:
            device = args[0] if args else kwargs.pop(name, migration.source_type)
            mapped = migration.translate(device, call)
            if mapped is not device and isinstance(kwargs.get("dtype"), torch.dtype):
                kwargs["dtype"] = adjust_dtype(kwargs["dtype"], str(mapped))
            type_only = isinstance(mapped, torch.device) and not with_index
            initialize(self, mapped.type if type_only else mapped, *args[1:], **kwargs)

        return initialize_mapped

    apply_patch(f"{class_name}.__init__", change, "scripts")


def _translate_map_location(load: Any, migration: Migration) -> Any:
    """Return a `torch.load` replacement that maps `cuda` in the `map_location` argument."""

    @functools.wraps(load)
    def load_mapped(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(map_location, dict):
            map_location = {source: str(migration.translate(target, "load")) for source, target in map_location.items()}
        elif map_location is not None:
            map_location = migration.translate(map_location, "load")
        return load(f, map_location, *args, **kwargs)

    return load_mapped


def _choose_backend(original: Any, migration: Migration) -> Any:
    """Make `torch.compile` use the compiler backend that the device's sheet names."""
    rule = migration.make_plan().compiler.value

    @functools.wraps(original)
    def compile_mapped(model: Any = None, **options: Any) -> Any:
        if options.get("backend") not in _GENERIC_BACKENDS:
            return original(model, **options)
        if model is None:  # used as a decorator with arguments
            return lambda function: compile_mapped(function, **options)
        reason = _find_skip_reason(rule.backend, migration)
        if reason:
            migration.note(reason)
            return model
        # `mode` and `options` configure inductor; other backends do not accept them.
        changed = {name: value for name, value in options.items() if name not in ("mode", "options", "backend")}
        if rule.static:
            changed["dynamic"] = False
        migration.record(f"compile with {rule.backend}")
        return original(model, backend=rule.backend, **changed)

    return compile_mapped


def _find_skip_reason(backend: str, migration: Migration) -> str:
    """Return why `torch.compile` is ignored on the device, or an empty string if it is not."""
    if not backend:
        return "torch.compile is ignored: the device has no known compiler"
    if backend in _GENERIC_BACKENDS and find_device(migration.opened.sheet.name).virtual:
        return "torch.compile is ignored: inductor generates no code for a virtual device"
    return ""
