"""Portable pipelines: diffusers' own classes, with a plan and a `to` that follows it."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import diffusers
import torch

from anyaccel.errors import UsageError
from anyaccel.planning.decision import Decision
from anyaccel.planning.memory import Residence
from anyaccel.planning.plan import Plan
from anyaccel.runtime.call.run import run_call
from anyaccel.runtime.call.warmup import warm_up
from anyaccel.runtime.loading import derive_pipeline, load_pipeline
from anyaccel.runtime.placement.oom_retry import weights_on_cpu
from anyaccel.runtime.placement.place import place_pipeline, plan_pipeline, replan, resolve_device, settle
from anyaccel.runtime.placement_state import (
    Placement,
    being_offloaded,
    find_options,
    find_placement,
    forget_placement,
    is_being_offloaded,
    store_options,
)
from anyaccel.runtime.speed.compile import compile_components
from anyaccel.runtime.speed.quantize import check_not_quantized
from anyaccel.runtime.vendor_aliases import VendorAliases
from anyaccel.runtime.workarounds.function_modes import make_pipeline_function_mode

__all__ = [
    "AutoPipelineForImage2Image",
    "AutoPipelineForInpainting",
    "AutoPipelineForText2Image",
    "DiffusionPipeline",
    "Portable",
    "make_portable",
    "place",
    "plain_class",
]

_TOUCH_WEIGHTS = (
    "save_pretrained",
    *(f"{verb}_{what}" for verb in ("load", "unload") for what in ("lora_weights", "ip_adapter", "textual_inversion")),
    *(f"{verb}_{what}" for verb in ("fuse", "unfuse") for what in ("lora", "qkv_projections")),
)
"""Methods of diffusers' pipelines that read or change weights, and so must find them."""


class Portable(VendorAliases):
    """What a diffusers pipeline gains: a plan, and a `to` that follows it."""

    _plain_class: type

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Place the pipeline: `pipe.to("neuron")`, `pipe.to("auto", dtype="bf16")`, `pipe.to(torch.float16)`.

        Takes what diffusers takes, `auto`, `virtual:NAME`, an index, and every wish of `anyaccel.place`.
        """
        if is_being_offloaded(self):  # diffusers brings the models to the host first
            return super().to(*args, **kwargs)  # type: ignore[misc]
        device, asked = _read_target(args, kwargs)
        self.place_as_decided(device, asked)
        return self

    def place_as_decided(self, device: Any, asked: dict[str, Any], dtype: Decision[str] | None = None) -> None:
        """Place the pipeline; `dtype` is a decision that was made before, for example to load the weights in it."""

        def move(place: torch.device, dtype: torch.dtype | None) -> None:
            # The vendor's switches are set by now, so that diffusers need not set them.
            super(Portable, self).to(place, dtype, silence_dtype_warnings=True, hpu_migration=False)  # type: ignore[misc]

        place_pipeline(self, device, asked, move, dtype=dtype)

    @property
    def plan(self) -> Plan:
        """What was decided for this pipeline on its device, and why; `print(pipe.plan)`."""
        return _placement_of(self).plan

    @property
    def _execution_device(self) -> Any:
        """Where models run: diffusers looks through all of their layers for hooks, several times a picture."""
        placement = find_placement(self)
        if placement is None or placement.residence != "resident" or placement.offloaded_by_user:
            return super()._execution_device  # type: ignore[misc]
        return placement.device

    def progress_bar(self, *args: Any, **kwargs: Any) -> Any:
        """The pipeline's own progress bar, or its share of one where several calls make one batch."""
        make_bar: Any = super().progress_bar  # type: ignore[misc]
        placement = find_placement(self)
        if placement is None or placement.progress is None:
            return make_bar(*args, **kwargs)
        return placement.progress.begin(make_bar, *args, **kwargs)

    def enable_attention_slicing(self, slice_size: str | int | None = "auto") -> None:
        """Attend to some heads at a time, in every attention of every model: `auto` half of them, `max` one."""
        replan(self, _placement_of(self), {"attention_slicing": slice_size})

    def disable_attention_slicing(self) -> None:
        """Attend to all heads at once again, where the device's limits allow it."""
        self.enable_attention_slicing(None)

    def enable_compile(
        self,
        model_names: Sequence[str] | str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        fullgraph: bool | None = None,
    ) -> None:
        """Compile models with the device's compiler: the denoiser, or those that are named; `"all"` for every one.

        `cache_dir` is where the vendor's compiler keeps its graphs, so that a second process finds them; the
        environment is changed only while a call runs. Each size is compiled when it is first run: see `warmup`.
        """
        compile_components(self, _placement_of(self), model_names, cache_dir, fullgraph)

    def warmup(self, shapes: Any = None, **arguments: Any) -> None:
        """Run one step at each size, so that the first picture is as fast as the next: `warmup([(512, 512)])`.

        Further arguments are the call's: what decides the shapes, such as `num_images_per_prompt`, belongs there. It
        leaves no trace: the next picture is the one that would have come without it.
        """
        warm_up(self, shapes, arguments)

    def enable_model_cpu_offload(self, gpu_id: int | None = None, device: Any = None) -> None:
        """Move each model to the device only while it runs; the device is `auto` unless one is named."""
        self._offload("enable_model_cpu_offload", gpu_id, device)

    def enable_sequential_cpu_offload(self, gpu_id: int | None = None, device: Any = None) -> None:
        """Move each layer to the device only while it runs; the device is `auto` unless one is named."""
        self._offload("enable_sequential_cpu_offload", gpu_id, device)

    def _offload(self, method: str, gpu_id: int | None, device: Any) -> None:
        enable: Any = getattr(super(), method)
        if is_being_offloaded(self):  # a plan does it, or diffusers itself, anew after every call
            enable(device=device)
            return
        wanted = (device if device is not None else "auto") if gpu_id is None else gpu_id

        def cast(place: torch.device, dtype: torch.dtype | None) -> None:
            if dtype is not None:
                super(Portable, self).to(dtype=dtype, silence_dtype_warnings=True)  # type: ignore[misc]

        with being_offloaded(self):
            residence: Residence = "component" if method == "enable_model_cpu_offload" else "layer"
            place_pipeline(self, wanted, {}, cast, offloaded=residence)
            placement = _placement_of(self)
            with make_pipeline_function_mode(placement.plan, placement.device):
                enable(device=placement.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy a pipeline; weights that wait elsewhere are copied from host memory, and the copy is placed alike."""
        placement = find_placement(self)
        elsewhere = placement is not None and placement.residence in ("phase", "layer")
        with weights_on_cpu(self):
            rebuild, parts = self.__reduce__()
            made = rebuild(*copy.deepcopy(parts, memo))
        return made.to(placement.opened.torch_device) if placement is not None and elsewhere else made

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is made here and cannot be found by its name: the plain one is pickled, and made portable again.
        return _unpickle, (self._plain_class, forget_placement(vars(self)))


def _unpickle(kind: Any, state: dict[str, Any]) -> Any:
    pipe = kind.__new__(kind)
    vars(pipe).update(state)
    return make_portable(pipe)


def _placement_of(pipe: Any) -> Placement:
    """Where a pipeline is; one that was never placed is planned for where it lies, as it is."""
    found = find_placement(pipe)
    if found is not None:
        return found
    lies_on, dtype = getattr(pipe, "device", torch.device("cpu")), getattr(pipe, "dtype", torch.float32)
    placement_options = find_options(pipe)
    opened = resolve_device(lies_on, placement_options)
    name = str(dtype).removeprefix("torch.")
    plan = plan_pipeline(
        pipe, opened, replace(placement_options, dtype=name), Decision(name, "the dtype that it was loaded in")
    )
    settle(pipe, Placement(opened, lies_on, plan, placement_options))
    made = find_placement(pipe)
    assert made is not None
    return made


def _read_target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Device and wishes from any spelling of `to`."""
    asked = {name: value for name, value in kwargs.items() if name not in ("device", "silence_dtype_warnings")}
    device = kwargs.get("device")
    for value in args:
        if isinstance(value, torch.dtype):
            asked["dtype"] = value
        elif value is not None:
            device = value
    if asked.get("dtype", ...) is None:  # diffusers' own way to say that the type stays
        del asked["dtype"]
    return device, asked


def plain_class(pipe: Any) -> type:
    """The diffusers class of a pipeline, portable or not."""
    return type(pipe)._plain_class if isinstance(pipe, Portable) else type(pipe)


def inherit_placement(pipe: Any, source: Any) -> None:
    """Plan a pipeline for where the one is whose components it took over."""
    found = find_placement(source)
    if found is not None:
        plan = plan_pipeline(pipe, found.opened, found.options)
        settle(pipe, Placement(found.opened, found.device, plan, found.options))


def make_portable(pipe: Any) -> Any:
    """The same object with a class that is portable."""
    if not isinstance(pipe, Portable):
        kind: Any = type(pipe)
        pipe.__class__ = portable_class(kind)
    return pipe


@functools.cache
def portable_class(kind: Any) -> type:
    """A class like the pipeline's own, under its name: `isinstance`, the call's signature and the config stay."""
    first: type = DiffusionPipeline if issubclass(kind, diffusers.DiffusionPipeline) else Portable
    content: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "_plain_class": kind,
    }
    if any("__call__" in vars(base) for base in kind.__mro__):
        content["__call__"] = _wrap_call(kind)
    content |= {name: _with_weights(getattr(kind, name)) for name in _TOUCH_WEIGHTS if hasattr(kind, name)}
    return type(kind.__name__, (first, kind), content)


def _with_weights(method: Any) -> Any:
    @functools.wraps(method)
    def touch_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_not_quantized(self, method.__name__)
        with weights_on_cpu(self):
            return method(self, *args, **kwargs)

    return touch_weights


def _wrap_call(kind: Any) -> Any:
    @functools.wraps(kind.__call__)
    def portable_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Looked up at every call, so that a class patched later is used.
        return run_call(self, _placement_of(self), kind.__call__, args, kwargs)

    return portable_call


class DiffusionPipeline(Portable, diffusers.DiffusionPipeline):
    """`diffusers.DiffusionPipeline`, portable: loads any pipeline, and places it wherever it lands."""

    @classmethod
    def from_pretrained(cls, model: Any, **options: Any) -> Any:
        """Load a hub id, a local folder or a single file: `from_pretrained("org/name", dtype="bf16")`.

        Takes what diffusers takes. Weights are safetensors unless `use_safetensors=False`, and code that comes with a
        model runs only with `trust_remote_code=True`.
        """
        return _load_portable(vars(cls).get("_plain_class", diffusers.DiffusionPipeline), model, options)

    @classmethod
    def from_single_file(cls, model: Any, **options: Any) -> Any:
        """Load one checkpoint file; `config=` names the folder or hub id that describes it."""
        return _load_portable(vars(cls).get("_plain_class", diffusers.DiffusionPipeline), model, options)

    @classmethod
    def from_pipe(cls, pipeline: Any, **options: Any) -> Any:
        """A pipeline of this class from another one's components, on the same device."""
        return _derive_portable(vars(cls).get("_plain_class", plain_class(pipeline)), pipeline, options)


class _AutoPipeline:
    """Finds the pipeline for a task, as diffusers' class of the same name does, and makes it portable."""

    def __init__(self) -> None:
        raise UsageError(
            f"{type(self).__name__} is not made by itself", hint=f"{type(self).__name__}.from_pretrained(model)"
        )

    @classmethod
    def from_pretrained(cls, model: Any, **options: Any) -> Any:
        """Load a hub id or a local folder for this task."""
        return _load_portable(getattr(diffusers, cls.__name__), model, options)

    @classmethod
    def from_pipe(cls, pipeline: Any, **options: Any) -> Any:
        """The pipeline for this task from another one's components, on the same device."""
        return _derive_portable(getattr(diffusers, cls.__name__), pipeline, options)


class AutoPipelineForText2Image(_AutoPipeline):
    """`diffusers.AutoPipelineForText2Image`, portable."""


class AutoPipelineForImage2Image(_AutoPipeline):
    """`diffusers.AutoPipelineForImage2Image`, portable."""


class AutoPipelineForInpainting(_AutoPipeline):
    """`diffusers.AutoPipelineForInpainting`, portable."""


def _load_portable(kind: Any, model: Any, options: dict[str, Any]) -> Any:
    pipe, placement_options = load_pipeline(kind, model, options)
    store_options(make_portable(pipe), placement_options)
    return pipe


def _derive_portable(kind: Any, pipeline: Any, options: dict[str, Any]) -> Any:
    pipe, placement_options = derive_pipeline(kind, pipeline, options)
    store_options(make_portable(pipe), placement_options)
    inherit_placement(pipe, pipeline)
    return pipe


def place(pipe: Any, device: str | int | torch.device = "auto", **placement_options: Any) -> Any:
    """Make a pipeline that exists portable, and place it: `anyaccel.place(pipe, "hpu", dtype="bf16")`; returns it."""
    return make_portable(pipe).to(device, **placement_options)
