"""Patches for the modular pipelines of diffusers whose components manager moves them to the device of a script."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from anyaccel.backends.device_type_checks import is_host
from anyaccel.cuda_scripts.migration import Migration
from anyaccel.upstream.diffusers_loading import find_components_manager

__all__ = ["patch_components_manager", "place_before_calls"]

_OFFLOAD = "enable_auto_cpu_offload"
# The device that the script passed to `enable_auto_cpu_offload`, by manager.
_DEVICES: weakref.WeakKeyDictionary[Any, torch.device] = weakref.WeakKeyDictionary()

Place = Callable[[Any, torch.device, None, Migration], Any]


def patch_components_manager(module: ModuleType, migration: Migration) -> None:
    """Make `enable_auto_cpu_offload` place the manager's pipelines on the actual device when they are called.

    The manager itself cannot offload on every device: it requires `mem_get_info` of the device.
    """
    if migration.is_native:
        return
    manager_class = module.ComponentsManager
    disable = manager_class.disable_auto_cpu_offload

    def enable_auto_cpu_offload(self: Any, device: Any = None, *args: Any, **kwargs: Any) -> None:
        target = torch.device(migration.translate(migration.source_type if device is None else device, _OFFLOAD))
        if is_host(target):
            migration.note(f"{_OFFLOAD} is ignored: the device is the CPU")
        else:
            migration.note(f"{_OFFLOAD}: the weights stay on the device if they fit there, as with pipe.to")
            _DEVICES[self] = target

    def disable_auto_cpu_offload(self: Any) -> None:
        _DEVICES.pop(self, None)
        disable(self)

    manager_class.enable_auto_cpu_offload = enable_auto_cpu_offload
    manager_class.disable_auto_cpu_offload = functools.wraps(disable)(disable_auto_cpu_offload)


def place_before_calls(pipeline_class: Any, migration: Migration, place: Place) -> None:
    """Make calls of modular pipelines place the pipeline if its manager was told to offload it."""
    call = pipeline_class.__call__

    @functools.wraps(call)
    def place_and_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        from anyaccel.runtime.pipeline import Portable

        manager = find_components_manager(self)
        device = None if manager is None else _DEVICES.get(manager)
        if device is None or isinstance(self, Portable):
            return call(self, *args, **kwargs)
        return place(self, device, None, migration)(*args, **kwargs)

    pipeline_class.__call__ = place_and_call
