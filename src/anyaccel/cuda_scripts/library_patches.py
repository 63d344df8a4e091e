"""Patches for diffusers, transformers and safetensors that map the devices in a script's calls.

Each library is patched only when the script imports it: libraries read environment variables at import
time, and a script may set those variables first.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from anyaccel.backends.device_type_checks import is_host, is_on
from anyaccel.cuda_scripts.migration import Migration
from anyaccel.cuda_scripts.modular_patches import patch_components_manager, place_before_calls
from anyaccel.emulator.torch_patch_registry import apply_patch
from anyaccel.planning.options import PlacementOptions

__all__ = ["install_library_patches"]

ModulePatch = Callable[[ModuleType, Migration], None]
_OFFLOADS = ("enable_model_cpu_offload", "enable_sequential_cpu_offload")
# Values of `device_map` that distribute a model over all devices; with one device, all of it goes there.
_AUTOMATIC_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
_XFORMERS = "enable_xformers_memory_efficient_attention is ignored: xformers requires CUDA; PyTorch attention is used"


def install_library_patches(migration: Migration) -> None:
    """Patch the libraries that are already imported, and patch the others as soon as they are imported."""
    patches: dict[str, ModulePatch] = {
        "diffusers.pipelines.pipeline_utils": _patch_pipelines,
        "diffusers.pipelines.auto_pipeline": _patch_auto_pipelines,
        "diffusers.modular_pipelines.modular_pipeline": _patch_modular_pipelines,
        "diffusers.modular_pipelines.components_manager": patch_components_manager,
        "diffusers.models.modeling_utils": functools.partial(_patch_models, class_name="ModelMixin"),
        "transformers.modeling_utils": functools.partial(_patch_models, class_name="PreTrainedModel"),
        "safetensors.torch": _patch_safetensors,
        "anyaccel.runtime.pipeline": _patch_portable,
    }
    pending = {}
    for name, patch in patches.items():
        if name in sys.modules:
            patch(sys.modules[name], migration)
        else:
            pending[name] = patch
    sys.meta_path.insert(0, _PatchOnImport(pending, migration))


class _PatchOnImport(importlib.abc.MetaPathFinder):
    """Import hook that patches a module right after the module is executed."""

    def __init__(self, pending: dict[str, ModulePatch], migration: Migration) -> None:
        self.pending, self.migration = pending, migration

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the module's own import spec, with a loader that patches the module after executing it."""
        # pop, not get: importlib.util.find_spec calls this method again, which must return None then.
        patch = self.pending.pop(name, None)
        spec = importlib.util.find_spec(name) if patch is not None else None
        if patch is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            # Some loaders, such as pytest's, load more than one module.
            if module.__name__ == name:
                patch(module, self.migration)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def _replace_method(cls: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a method with `make(method)` if the class itself defines it."""
    # vars, not getattr: an inherited method is patched on the class that defines it.
    before = vars(cls).get(name)
    if before is None:
        return
    if isinstance(before, classmethod):
        setattr(cls, name, classmethod(functools.wraps(before.__func__)(make(before.__func__))))
    else:
        setattr(cls, name, functools.wraps(before)(make(before)))


def _patch_pipelines(module: ModuleType, migration: Migration) -> None:
    pipeline_class = module.DiffusionPipeline
    _replace_method(pipeline_class, "to", lambda before: _patch_to(before, migration))
    _replace_method(pipeline_class, "from_pretrained", lambda before: _patch_pipeline_loading(before, migration))
    _replace_method(pipeline_class, "from_pipe", lambda before: _patch_from_pipe(before, migration))
    for name in _OFFLOADS:
        _replace_method(pipeline_class, name, lambda before: _patch_offload(before, migration))
    _replace_method(pipeline_class, "enable_group_offload", lambda before: _patch_group_offload(before, migration))
    _ignore_xformers(pipeline_class, migration)


def _patch_auto_pipelines(module: ModuleType, migration: Migration) -> None:
    for name in ("AutoPipelineForText2Image", "AutoPipelineForImage2Image", "AutoPipelineForInpainting"):
        _replace_method(getattr(module, name), "from_pipe", lambda before: _patch_from_pipe(before, migration))


def _patch_modular_pipelines(module: ModuleType, migration: Migration) -> None:
    _replace_method(module.ModularPipeline, "to", lambda before: _patch_to(before, migration))
    place_before_calls(module.ModularPipeline, migration, place_script_pipeline)


def _patch_portable(module: ModuleType, migration: Migration) -> None:
    """Map the device arguments of pipelines that already have anyaccel's `to` and offload methods."""

    def make_to(before: Callable[..., Any]) -> Callable[..., Any]:
        def to(self: Any, *args: Any, **kwargs: Any) -> Any:
            translated = [migration.translate(value, "pipeline.to") for value in args]
            if kwargs.get("device") is not None:
                kwargs["device"] = migration.translate(kwargs["device"], "pipeline.to")
            return before(self, *translated, **kwargs)

        return to

    def make_enable(before: Callable[..., Any]) -> Callable[..., Any]:
        def enable(self: Any, gpu_id: int | None = None, device: Any = None) -> None:
            before(self, device=_find_target(gpu_id, device, before.__name__, migration))

        return enable

    _replace_method(module.Portable, "to", make_to)
    for name in _OFFLOADS:
        _replace_method(module.Portable, name, make_enable)


def _patch_models(module: ModuleType, migration: Migration, class_name: str) -> None:
    if migration.is_native:
        return
    _replace_method(
        getattr(module, class_name), "from_pretrained", lambda before: _patch_model_loading(before, migration)
    )
    _ignore_xformers(getattr(module, class_name), migration)


def _patch_safetensors(module: ModuleType, migration: Migration) -> None:
    def make_load(before: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(before)
        def load(filename: Any, device: Any = "cpu") -> Any:
            return before(filename, device=_to_string(migration.translate(device, "load_file")))

        return load

    if not migration.is_native:
        apply_patch(f"{module.__name__}.load_file", make_load, "scripts")


def _to_string(device: Any) -> Any:
    """Return the device as a string, for libraries that accept only strings."""
    return str(device) if isinstance(device, torch.device) else device


def _ignore_xformers(cls: Any, migration: Migration) -> None:
    if not migration.is_native:
        name = "enable_xformers_memory_efficient_attention"
        _replace_method(cls, name, lambda before: lambda self, *args, **kwargs: migration.note(_XFORMERS))


def _patch_to(before: Callable[..., Any], migration: Migration) -> Callable[..., Any]:
    """Return a `pipe.to` method that places the pipeline on the actual device when called with `cuda`.

    Calls that do not name an accelerator are unchanged.
    """

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        from anyaccel.runtime.pipeline import Portable  # here: it imports diffusers, which the script may configure

        candidates = [*args, kwargs.get("device")]
        if isinstance(self, Portable) or not any(_is_accelerator(value, migration) for value in candidates):
            return before(self, *args, **kwargs)
        device = next(value for value in candidates if _is_accelerator(value, migration))
        dtype = next((value for value in (*args, kwargs.get("dtype")) if isinstance(value, torch.dtype)), None)
        return place_script_pipeline(self, migration.translate(device, "pipeline.to"), dtype, migration)

    return to


def _is_accelerator(value: Any, migration: Migration) -> bool:
    """Return whether a value refers to the accelerator: `cuda`, an index, or the actual device type."""
    # bool is an int: `device=True` is not an index.
    if isinstance(value, int) and not isinstance(value, bool):
        return True
    is_actual = isinstance(value, str | torch.device) and is_on(value, migration.device.type)
    return migration.is_source_device(value) or (is_actual and not is_host(migration.device))


def place_script_pipeline(pipe: Any, device: torch.device, dtype: torch.dtype | None, migration: Migration) -> Any:
    """Place a pipeline on the device, in the script's dtypes if the device supports them."""
    from anyaccel.runtime.pipeline import Portable, make_portable

    placement_options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    # A pipeline that is already placed, or was loaded by anyaccel, keeps its earlier options.
    if dtype is None and not isinstance(pipe, Portable):
        placement_options = {"keep_dtypes": True}
    # Not `place`, which keeps some weights in float32: `pipe.to("cuda", dtype)` of diffusers casts all.
    make_portable(pipe).to(str(device), **placement_options)
    migration.pipelines += 1
    return pipe


def _find_target(gpu_id: int | None, device: Any, call: str, migration: Migration) -> Any:
    """Return the actual device for `gpu_id` or `device`, the arguments of diffusers' offload methods."""
    if device is not None:
        return migration.translate(device, call)
    return migration.translate(migration.source_type if gpu_id is None else gpu_id, call)


def _patch_offload(before: Callable[..., Any], migration: Migration) -> Callable[..., Any]:
    """Make a CPU offload method plan the pipeline for the actual device before offloading it."""

    def enable(self: Any, gpu_id: int | None = None, device: Any = None) -> None:
        from anyaccel.runtime.pipeline import Portable, make_portable
        from anyaccel.runtime.placement_state import store_options

        if isinstance(self, Portable):
            before(self, gpu_id, device)
            return
        target = _find_target(gpu_id, device, before.__name__, migration)
        if is_host(target):
            migration.note(f"{before.__name__} is ignored: the device is the CPU")
            return
        store_options(self, PlacementOptions(keep_dtypes=True))
        getattr(make_portable(self), before.__name__)(device=target)
        migration.pipelines += 1

    return enable


def _patch_group_offload(before: Callable[..., Any], migration: Migration) -> Callable[..., Any]:
    """Make `enable_group_offload` place the pipeline on the actual device."""

    def enable(self: Any, onload_device: Any, *args: Any, use_stream: bool = False, **kwargs: Any) -> None:
        from anyaccel.runtime.pipeline import make_portable
        from anyaccel.runtime.placement.place import place_pipeline

        target = torch.device(migration.translate(onload_device, before.__name__))
        if use_stream and not migration.is_native:
            migration.note("use_stream is ignored: layers are loaded synchronously")
            use_stream = False

        def move(device: torch.device, dtype: torch.dtype | None) -> None:
            # Cast before the offload hooks take over the weights.
            if dtype not in (None, self.dtype):
                self.to(dtype)
            before(self, target, *args, use_stream=use_stream, **kwargs)

        place_pipeline(make_portable(self), str(target), {"keep_dtypes": True}, move)
        migration.pipelines += 1

    return enable


def _patch_pipeline_loading(before: Callable[..., Any], migration: Migration) -> Callable[..., Any]:
    """Make `from_pretrained(…, device_map='cuda')` load the pipeline to the CPU and then place it."""

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        device = _pop_device_map(kwargs, migration)
        pipe = before(cls, *args, **kwargs)
        if device is None:
            return pipe
        place_script_pipeline(pipe, device, None, migration)
        vars(pipe)["hf_device_map"] = str(device)  # diffusers sets it too
        return pipe

    return from_pretrained


def _patch_model_loading(before: Callable[..., Any], migration: Migration) -> Callable[..., Any]:
    """Make a model's `from_pretrained` with `device_map='cuda'` load to the CPU and then move the model."""

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        device = _pop_device_map(kwargs, migration)
        model = before(cls, *args, **kwargs)
        return model if device is None else model.to(device)

    return from_pretrained


def _pop_device_map(options: dict[str, Any], migration: Migration) -> torch.device | None:
    """Remove `device_map` from the options if it maps to a single device, and return that device.

    Automatic maps such as `auto` are treated as a single device. In any other map, replace `cuda` with the
    actual device and return None.
    """
    device_map = options.get("device_map")
    if isinstance(device_map, dict):
        devices = {module: migration.translate(value, "device_map") for module, value in device_map.items()}
        if set(map(str, devices.values())) == {str(migration.device)}:
            del options["device_map"]
            return migration.device
        options["device_map"] = {module: _to_string(device) for module, device in devices.items()}
        return None
    if device_map in _AUTOMATIC_MAPS:
        migration.record(f"device_map={device_map!r}")
        device = migration.device
    elif device_map is None or not _is_accelerator(device_map, migration):
        return None
    else:
        device = migration.translate(device_map, "device_map")
    del options["device_map"]
    return device


def _patch_from_pipe(before: Callable[..., Any], migration: Migration) -> Callable[..., Any]:
    """Count the pipelines that `from_pipe` returns already placed, because their components are placed."""

    def from_pipe(cls: Any, pipeline: Any, **kwargs: Any) -> Any:
        from anyaccel.runtime.placement_state import find_placement

        derived = before(cls, pipeline, **kwargs)
        if find_placement(derived) is not None:
            migration.pipelines += 1
        return derived

    return from_pipe
