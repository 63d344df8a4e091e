"""Libraries: what diffusers, transformers and safetensors are told about a device, told of the one that is here.

A library is changed when the script imports it, and not before: what a script sets in the environment still counts.
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

from anyaccel.backends.device_functions import adjust_dtype, dtype_name
from anyaccel.backends.torch_device import is_host, is_on
from anyaccel.cuda_scripts.migration import Migration
from anyaccel.emulator.torch_patches import apply_patch
from anyaccel.planning.options import PlacementOptions

__all__ = ["install_library_patches"]

Change = Callable[[ModuleType, Migration], None]
_OFFLOADS = ("enable_model_cpu_offload", "enable_sequential_cpu_offload")
_WHOLE = ("auto", "balanced", "balanced_low_0", "sequential")
"""Ways to spread a model over the devices: with one device it lies there."""
_XFORMERS = (
    "enable_xformers_memory_efficient_attention is left out: xformers is for CUDA, and torch's own attention runs"
)


def install_library_patches(migration: Migration) -> None:
    """Change each library that is imported already, and the others when they are."""
    changes: dict[str, Change] = {
        "diffusers.pipelines.pipeline_utils": _change_pipelines,
        "diffusers.pipelines.auto_pipeline": _change_auto_pipelines,
        "diffusers.modular_pipelines.modular_pipeline": _change_modular_pipelines,
        "diffusers.models.modeling_utils": functools.partial(_change_models, kind="ModelMixin"),
        "transformers.modeling_utils": functools.partial(_change_models, kind="PreTrainedModel"),
        "safetensors.torch": _change_safetensors,
        "anyaccel.runtime.pipeline": _change_portable,
    }
    waiting = {}
    for name, change in changes.items():
        if name in sys.modules:
            change(sys.modules[name], migration)
        else:
            waiting[name] = change
    sys.meta_path.insert(0, _Watch(waiting, migration))


class _Watch(importlib.abc.MetaPathFinder):
    """Finds nothing by itself: it sees a module come, and changes it once it is there."""

    def __init__(self, waiting: dict[str, Change], migration: Migration) -> None:
        self.waiting, self.migration = waiting, migration

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The module's own spec, with a loader that changes the module after it ran."""
        change = self.waiting.pop(name, None)
        spec = importlib.util.find_spec(name) if change is not None else None
        if change is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            change(module, self.migration)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def _replace(kind: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put another method in the place of one; `make` gets the function behind it."""
    before = vars(kind).get(name)
    if before is None:
        return
    if isinstance(before, classmethod):
        setattr(kind, name, classmethod(functools.wraps(before.__func__)(make(before.__func__))))
    else:
        setattr(kind, name, functools.wraps(before)(make(before)))


def _change_pipelines(module: ModuleType, migration: Migration) -> None:
    kind = module.DiffusionPipeline
    _replace(kind, "to", lambda before: _placing(before, migration))
    _replace(kind, "from_pretrained", lambda before: _loading_pipeline(before, migration))
    _replace(kind, "from_pipe", lambda before: _deriving(before, migration))
    for name in _OFFLOADS:
        _replace(kind, name, lambda before: _offloading(before, migration))
    _replace(kind, "enable_group_offload", lambda before: _grouping(before, migration))
    _leave_out_xformers(kind, migration)


def _change_auto_pipelines(module: ModuleType, migration: Migration) -> None:
    for name in ("AutoPipelineForText2Image", "AutoPipelineForImage2Image", "AutoPipelineForInpainting"):
        _replace(getattr(module, name), "from_pipe", lambda before: _deriving(before, migration))


def _change_modular_pipelines(module: ModuleType, migration: Migration) -> None:
    _replace(module.ModularPipeline, "to", lambda before: _placing(before, migration))


def _change_portable(module: ModuleType, migration: Migration) -> None:
    """A portable pipeline places itself, and is told the device."""

    def moving(before: Callable[..., Any]) -> Callable[..., Any]:
        def to(self: Any, *args: Any, **kwargs: Any) -> Any:
            here = [migration.translate(value, "pipeline.to") for value in args]
            if kwargs.get("device") is not None:
                kwargs["device"] = migration.translate(kwargs["device"], "pipeline.to")
            return before(self, *here, **kwargs)

        return to

    def offloading(before: Callable[..., Any]) -> Callable[..., Any]:
        def enable(self: Any, gpu_id: int | None = None, device: Any = None) -> None:
            before(self, device=_find_target(gpu_id, device, before.__name__, migration))

        return enable

    _replace(module.Portable, "to", moving)
    for name in _OFFLOADS:
        _replace(module.Portable, name, offloading)


def _change_models(module: ModuleType, migration: Migration, kind: str) -> None:
    if migration.is_native:
        return
    _replace(getattr(module, kind), "from_pretrained", lambda before: _loading_model(before, migration))
    _leave_out_xformers(getattr(module, kind), migration)


def _change_safetensors(module: ModuleType, migration: Migration) -> None:
    def loading(before: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(before)
        def load(filename: Any, device: Any = "cpu") -> Any:
            return before(filename, device=_spell(migration.translate(device, "load_file")))

        return load

    if not migration.is_native:
        apply_patch(f"{module.__name__}.load_file", loading, "scripts")


def _spell(device: Any) -> Any:
    """A device in words, for a library that reads words."""
    return str(device) if isinstance(device, torch.device) else device


def _leave_out_xformers(kind: Any, migration: Migration) -> None:
    if not migration.is_native:
        name = "enable_xformers_memory_efficient_attention"
        _replace(kind, name, lambda before: lambda self, *args, **kwargs: migration.note(_XFORMERS))


def _placing(before: Callable[..., Any], migration: Migration) -> Callable[..., Any]:
    """`pipe.to("cuda")`: the pipeline is made portable, and placed; what names no accelerator is as it was."""

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        from anyaccel.runtime.pipeline import Portable

        named = [*args, kwargs.get("device")]
        if isinstance(self, Portable) or not any(_is_accelerator(value, migration) for value in named):
            return before(self, *args, **kwargs)
        device = next(value for value in named if _is_accelerator(value, migration))
        asked = next((value for value in (*args, kwargs.get("dtype")) if isinstance(value, torch.dtype)), None)
        return place_pipeline_of_script(self, migration.translate(device, "pipeline.to"), asked, migration)

    return to


def _is_accelerator(value: Any, migration: Migration) -> bool:
    """Whether a value names the accelerator: by the script's name, by a number, or by its own name."""
    if isinstance(value, int) and not isinstance(value, bool):
        return True
    own = isinstance(value, str | torch.device) and is_on(value, migration.device.type)
    return migration.means(value) or (own and not is_host(migration.device))


def place_pipeline_of_script(pipe: Any, device: torch.device, dtype: torch.dtype | None, migration: Migration) -> Any:
    """Place a pipeline in the number types that the script gave it, as far as the device takes them."""
    from anyaccel.runtime.pipeline import Portable, make_portable, place

    types = {} if dtype is not None else _read_types(pipe)
    placement_options = {"dtype": dtype or getattr(pipe, "dtype", None)}
    if isinstance(pipe, Portable):
        # The script placed it before, or had anyaccel load it: what was wished for then still holds.
        placement_options = {"dtype": dtype} if dtype is not None else {}
    place(make_portable(pipe), str(device), **placement_options)
    _give_types_back(types, device)
    migration.pipelines += 1
    return pipe


def _read_types(pipe: Any) -> dict[Any, torch.dtype]:
    """The models whose type is not the pipeline's own, with their types."""
    models = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    types = {model: getattr(model, "dtype", None) for model in models}
    return {model: kept for model, kept in types.items() if isinstance(kept, torch.dtype) and kept != pipe.dtype}


def _give_types_back(types: dict[Any, torch.dtype], device: torch.device) -> None:
    for model, kept in types.items():
        model.to(adjust_dtype(kept, str(device)))


def _find_target(gpu_id: int | None, device: Any, asked: str, migration: Migration) -> Any:
    """The device that models are to come to from the host."""
    if device is not None:
        return migration.translate(device, asked)
    return migration.translate(migration.foreign if gpu_id is None else gpu_id, asked)


def _offloading(before: Callable[..., Any], migration: Migration) -> Callable[..., Any]:
    """Models that wait on the host: made portable first, so that they are planned for the device that is here."""

    def enable(self: Any, gpu_id: int | None = None, device: Any = None) -> None:
        from anyaccel.runtime.pipeline import Portable, make_portable
        from anyaccel.runtime.placement_state import store_options

        if isinstance(self, Portable):
            before(self, gpu_id, device)
            return
        target = _find_target(gpu_id, device, before.__name__, migration)
        if is_host(target):
            migration.note(f"{before.__name__} is left out: there is no accelerator to come from the host to")
            return
        types = _read_types(self)
        store_options(self, PlacementOptions(dtype=dtype_name(self.dtype)))
        getattr(make_portable(self), before.__name__)(device=target)
        _give_types_back(types, target)
        migration.pipelines += 1

    return enable


def _grouping(before: Callable[..., Any], migration: Migration) -> Callable[..., Any]:
    """Groups of layers that wait on the host."""

    def enable(self: Any, onload_device: Any, *args: Any, use_stream: bool = False, **kwargs: Any) -> None:
        from anyaccel.runtime.pipeline import make_portable
        from anyaccel.runtime.placement.place import place_pipeline

        target = torch.device(migration.translate(onload_device, before.__name__))
        if use_stream and not migration.is_native:
            migration.note("use_stream is left out: layers are fetched in the order in which they run")
            use_stream = False

        def bring(place: torch.device, dtype: torch.dtype) -> None:
            if dtype != self.dtype:
                self.to(dtype)
            before(self, target, *args, use_stream=use_stream, **kwargs)

        place_pipeline(make_portable(self), str(target), {"dtype": self.dtype}, bring)
        migration.pipelines += 1

    return enable


def _loading_pipeline(before: Callable[..., Any], migration: Migration) -> Callable[..., Any]:
    """`from_pretrained(…, device_map="cuda")`: loaded on the host, and placed."""

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        device = _take_device_map(kwargs, migration)
        pipe = before(cls, *args, **kwargs)
        if device is None:
            return pipe
        place_pipeline_of_script(pipe, device, None, migration)
        vars(pipe)["hf_device_map"] = str(device)
        return pipe

    return from_pretrained


def _loading_model(before: Callable[..., Any], migration: Migration) -> Callable[..., Any]:
    """The same for a model by itself."""

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        device = _take_device_map(kwargs, migration)
        model = before(cls, *args, **kwargs)
        return model if device is None else model.to(device)

    return from_pretrained


def _take_device_map(options: dict[str, Any], migration: Migration) -> torch.device | None:
    """The device that a `device_map` puts all of a model on, taken out of the options; a map in parts is translated."""
    asked = options.get("device_map")
    if isinstance(asked, dict):
        places = {part: migration.translate(value, "device_map") for part, value in asked.items()}
        whole = set(map(str, places.values()))
        if whole == {str(migration.device)}:
            del options["device_map"]
            return migration.device
        options["device_map"] = {part: _spell(place) for part, place in places.items()}
        return None
    if asked in _WHOLE:
        migration.record(f"device_map={asked!r}")
        device = migration.device
    elif asked is None or not _is_accelerator(asked, migration):
        return None
    else:
        device = migration.translate(asked, "device_map")
    del options["device_map"]
    return device


def _deriving(before: Callable[..., Any], migration: Migration) -> Callable[..., Any]:
    """`from_pipe(pipe)`: made of the components of a pipeline that is placed, and so placed too."""

    def from_pipe(cls: Any, pipeline: Any, **kwargs: Any) -> Any:
        from anyaccel.runtime.pipeline import inherit_placement, make_portable
        from anyaccel.runtime.placement_state import find_placement

        made = before(cls, pipeline, **kwargs)
        if find_placement(pipeline) is not None and find_placement(made) is None:
            inherit_placement(make_portable(made), pipeline)
            migration.pipelines += 1
        return made

    return from_pipe
