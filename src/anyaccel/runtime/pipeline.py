"""Portable pipelines: diffusers classes with a plan and a `to` method that supports every device."""

from __future__ import annotations

import copy
import functools
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, overload

import diffusers
import torch

from anyaccel.backends.device import OpenDevice
from anyaccel.backends.device_functions import dtype_name
from anyaccel.errors import UsageError
from anyaccel.planning.decision import Decision
from anyaccel.planning.memory import Residence
from anyaccel.planning.options import PlacementOptions
from anyaccel.planning.plan import Plan
from anyaccel.runtime.call.between_calls import between_calls, make_running_error
from anyaccel.runtime.call.run import run_call
from anyaccel.runtime.call.validation import reject_unused_seed
from anyaccel.runtime.call.warmup import warm_up
from anyaccel.runtime.introspection import find_models, plain_class
from anyaccel.runtime.loading import derive_pipeline, keep_dtype, load_pipeline
from anyaccel.runtime.own_methods import (
    call_own_to,
    check_model_attributes,
    find_own_methods,
    read_attributes,
    read_to_arguments,
    write_attributes,
)
from anyaccel.runtime.placement.current_placement import require_placement
from anyaccel.runtime.placement.inherit import adopt_before_move, adopt_placement, place_copy
from anyaccel.runtime.placement.oom_retry import remove_offload_hooks, weights_on_cpu
from anyaccel.runtime.placement.place import place_pipeline, replan, resolve_device
from anyaccel.runtime.placement.quantized_layers import find_models_to_quantize, quantize_models
from anyaccel.runtime.placement_state import (
    being_offloaded,
    defer_placement,
    find_options,
    find_placed_model,
    find_placement,
    forget_placement,
    is_being_offloaded,
    store_options,
)
from anyaccel.runtime.speed.compile import compile_components
from anyaccel.runtime.vendor_method_aliases import VendorAliases
from anyaccel.runtime.weight_files.moving import LoadTarget, choose_loading_dtype, take_placement_options
from anyaccel.runtime.weight_methods import WEIGHT_METHODS, with_weights
from anyaccel.runtime.workarounds.function_modes import make_pipeline_function_mode
from anyaccel.upstream.diffusers_hooks import PipelineHooks, install_pipeline_hooks, is_created_by_pipeline
from anyaccel.upstream.diffusers_internals import has_custom_processors
from anyaccel.upstream.torch_compile_internals import unwrap_compiled

__all__ = [
    "DiffusionPipeline",
    "ModularPipeline",
    "Portable",
    "derive_portable",
    "load_onto",
    "load_portable",
    "make_portable",
    "place",
]

_THREAD = threading.local()


class PlanAttribute:
    """The decisions for a pipeline on its device, with their reasons: `print(pipe.plan)`."""

    # Not a property, which would prevent a custom pipeline from having an attribute of this name.
    @overload
    def __get__(self, pipe: None, kind: type) -> PlanAttribute: ...
    @overload
    def __get__(self, pipe: Portable, kind: type) -> Plan: ...
    def __get__(self, pipe: Portable | None, kind: type) -> Plan | PlanAttribute:
        return self if pipe is None else require_placement(pipe).plan


class Portable(VendorAliases):
    """Mixin with the methods that anyaccel adds to a diffusers pipeline."""

    _plain_class: type

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Run the `__init_subclass__` of the user's classes, except for the class that `portable_class` creates."""
        if "_plain_class" not in vars(cls):
            super().__init_subclass__(**kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Place the pipeline on a device: `pipe.to("neuron")`, `pipe.to("auto", dtype="bf16")`.

        The arguments are those of diffusers' `to` and the options of `anyaccel.place`. The device can also
        be `"auto"`, `"virtual:NAME"` or a device index.
        """
        if is_being_offloaded(self):  # called by diffusers, which moves models to the CPU before offloading
            return super().to(*args, **kwargs)  # type: ignore[misc]
        if getattr(_THREAD, "ignores_to", False):
            return self
        device, options = read_to_arguments(args, kwargs)
        adopt_before_move(self)
        with between_calls(self, device, options) as is_idle:
            if is_idle:
                self.place_with_plan(device, options)
        return self

    def place_with_plan(self, device: Any, options: dict[str, Any], dtype: Decision[str] | None = None) -> None:
        """Place the pipeline on a device; `dtype` is the dtype decision if one was already made."""

        def move(target: torch.device, dtype: torch.dtype | None) -> None:
            # hpu_migration=False: diffusers would set the Gaudi variables, which `place_pipeline` has already set.
            own_to: Any = super(Portable, self).to  # type: ignore[misc]
            check_model_attributes(find_models(self), own_to)
            if not call_own_to(own_to, target, dtype, silence_dtype_warnings=True, hpu_migration=False):
                diffusers.DiffusionPipeline.to(self, dtype, silence_dtype_warnings=True)

        place_pipeline(self, device, options, move, dtype=dtype)

    plan = PlanAttribute()

    @property
    def _execution_device(self) -> Any:
        """The device on which the pipeline's models run."""
        # diffusers searches all layers for hooks each time, several times per image.
        placement = find_placement(self)
        if placement is None or placement.residence != "resident" or placement.offloaded_by_user:
            return super()._execution_device  # type: ignore[misc]
        return placement.device

    def enable_attention_slicing(self, slice_size: str | int | None = "auto") -> None:
        """Compute attention for a few heads at a time in every model, to reduce memory use.

        `slice_size` is the number of heads, `"auto"` for half of them or `"max"` for one head.
        """
        # The method of diffusers replaces the attention processors of the user.
        if any(has_custom_processors(model) for model in find_models(self).values()):
            super().enable_attention_slicing(slice_size)  # type: ignore[misc]
        replan(self, require_placement(self), {"attention_slicing": slice_size})

    def disable_attention_slicing(self) -> None:
        """Compute attention for all heads at once, unless a device limit requires slicing."""
        self.enable_attention_slicing(None)

    def enable_compile(
        self,
        model_names: Sequence[str] | str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        fullgraph: bool | None = None,
    ) -> None:
        """Compile models with the device's compiler: the denoiser by default, every model for `"all"`.

        `cache_dir` is the directory in which the vendor's compiler stores graphs for reuse by other
        processes. The compiler's environment variable for this directory is set only during calls. Each
        image size is compiled when it is first used; see `warmup`.
        """
        compile_components(self, require_placement(self), model_names, cache_dir, fullgraph)

    def warmup(self, shapes: Any = None, **arguments: Any) -> None:
        """Run one step at each (height, width) to compile models in advance: `warmup([(512, 512)])`.

        Additional arguments are passed to the pipeline call. Pass those that change tensor shapes, such as
        `num_images_per_prompt`. Schedulers and random states are restored.
        """
        warm_up(self, shapes, arguments)

    def enable_model_cpu_offload(self, gpu_id: int | None = None, device: Any = None) -> None:
        """Move each model to the device only while it runs.

        The device defaults to the accelerator on which the pipeline is placed, or to `"auto"`.
        """
        self._offload("enable_model_cpu_offload", gpu_id, device)

    def enable_sequential_cpu_offload(self, gpu_id: int | None = None, device: Any = None) -> None:
        """Move each layer to the device only while it runs; see `enable_model_cpu_offload`."""
        self._offload("enable_sequential_cpu_offload", gpu_id, device)

    def _offload(self, method: str, gpu_id: int | None, device: Any) -> None:
        enable: Any = getattr(super(), method, None)
        if enable is None:
            raise UsageError(
                f"{type(self).__name__} is a modular pipeline, which has no method {method}",
                hint="place it with memory='component' or memory='layer', or offload it with a components manager",
            )
        if is_being_offloaded(self):  # called by a plan, or by diffusers, which installs the hooks again after a call
            enable(device=device)
            return
        adopt_before_move(self)
        placement = find_placement(self)
        if placement is not None and placement.running:
            raise make_running_error(self, f"{method} cannot be called")
        current = "auto" if placement is None or placement.opened.sheet.is_host else placement.opened
        target = (device if device is not None else current) if gpu_id is None else gpu_id

        def cast(_device: torch.device, dtype: torch.dtype | None) -> None:
            # Only the dtype: diffusers moves the models itself when their hooks run.
            if dtype is not None:
                super(Portable, self).to(dtype=dtype, silence_dtype_warnings=True)  # type: ignore[misc]

        with being_offloaded(self):
            residence: Residence = "component" if method == "enable_model_cpu_offload" else "layer"
            place_pipeline(self, target, {}, cast, offloaded=residence)
            placement = require_placement(self)
            with make_pipeline_function_mode(placement.plan, placement.device):
                enable(device=placement.device)

    def maybe_free_model_hooks(self) -> None:
        """Offload the models after a call, as diffusers does."""
        with being_offloaded(self):  # diffusers moves the models and installs its hooks again
            super().maybe_free_model_hooks()  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a deep copy of the pipeline; a copy of an offloaded pipeline is placed on the same device."""
        placement = find_placement(self)
        offloaded = placement is not None and placement.residence in ("phase", "layer")
        with weights_on_cpu(self):
            # Registered before its attributes are copied, because one of them may refer to the pipeline.
            copied = memo[id(self)] = _create(self._plain_class)
            copied.__setstate__(copy.deepcopy(self._read_state(), memo))
        if placement is not None and offloaded:
            place_copy(copied, placement)
        return copied

    def __copy__(self) -> Any:
        """Return a pipeline with the same components; it follows their placement."""
        find_placement(self)  # a deferred placement has the options
        copied = _create(self._plain_class)
        copied.__setstate__(forget_placement(read_attributes(self)))
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        # The portable class is created at run time and cannot be imported, so the diffusers class is pickled.
        return _create, (self._plain_class,), self._read_state()

    def _read_state(self) -> dict[str, Any]:
        placement = find_placement(self)  # a deferred placement has the options
        if placement is not None and not placement.running:
            remove_offload_hooks(self, placement)  # they cannot be copied (docs/decisions/0006)
        return forget_placement(read_attributes(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        write_attributes(self, state)
        _inherit_from_components(self, self.components, is_copy=True)  # type: ignore[attr-defined]


def _create(kind: Any) -> Any:
    """Return a pipeline without attributes, which `__setstate__` sets."""
    return make_portable(kind.__new__(kind))


def make_portable(pipe: Any) -> Any:
    """Change a pipeline's class to the subclass with anyaccel's methods, and return the pipeline."""
    install_pipeline_hooks(_HOOKS)
    if not isinstance(pipe, Portable):
        kind: Any = type(pipe)
        pipe.__class__ = portable_class(kind)
    return pipe


@functools.cache
def portable_class(kind: Any) -> type:
    """Return the subclass of a diffusers pipeline class that adds anyaccel's methods.

    The subclass has the same name and call signature, and saved configs name the diffusers class.
    """
    bases = (DiffusionPipeline, diffusers.DiffusionPipeline), (ModularPipeline, diffusers.ModularPipeline)
    first: type = next((portable for portable, plain in bases if issubclass(kind, plain)), Portable)
    # `save_pretrained` writes the name of the class to the config, so the name must not change.
    content: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "_plain_class": kind,
    }
    if any("__call__" in vars(base) for base in kind.__mro__):
        content["__call__"] = _wrap_call(kind)
    content |= {name: with_weights(kind, name) for name in WEIGHT_METHODS if hasattr(kind, name)}
    content |= find_own_methods(kind, first)
    # `type(pipe).from_pretrained` loads as in diffusers: a program that reloads a pipeline did not choose this package.
    content |= {name: getattr(kind, name) for name in ("from_pretrained", "from_single_file") if hasattr(kind, name)}
    # Not `type(kind)(…)`: a metaclass of the user would register the class or require arguments.
    return type.__new__(type(kind), kind.__name__, (first, kind), content)  # type: ignore[no-any-return]


def _inherit_from_components(pipe: Any, components: dict[str, Any], *, is_copy: bool = False) -> None:
    """Make a new pipeline portable if one of its components was placed as part of another pipeline."""
    is_done = isinstance(pipe, Portable) and not is_copy
    if is_done or not any(find_placed_model(unwrap_compiled(component)) for component in components.values()):
        return
    if not is_created_by_pipeline(pipe):  # the parts of a combined pipeline run inside its calls
        # The pipeline's `__init__` is still running, so the plan is made later.
        defer_placement(make_portable(pipe), adopt_placement)


def _derive_in_diffusers(original: Any, cls: Any, pipeline: Any, options: dict[str, Any]) -> Any:
    """Create a pipeline with diffusers' `from_pipe`; keep the device and dtype of a portable pipeline."""
    if not isinstance(pipeline, Portable):
        return original(cls, pipeline, **options)
    if find_placement(pipeline) is None:
        derived = make_portable(original(cls, pipeline, **keep_dtype(cls, pipeline, options)))
        store_options(derived, find_options(pipeline))
        return derived
    requested = [options.pop(name, None) for name in ("dtype", "torch_dtype")]
    with _ignoring_to():
        derived = original(cls, pipeline, **options)
    for dtype in requested:
        if dtype is not None:
            derived.to(dtype=dtype)
    return derived


_HOOKS = PipelineHooks(
    on_components=_inherit_from_components, from_pipe=_derive_in_diffusers, on_progress_bar=reject_unused_seed
)


@contextmanager
def _ignoring_to() -> Iterator[None]:
    """Make `to` do nothing inside the `with` block, in this thread."""
    # `from_pipe` calls `to` on the new pipeline, which would cast components that are shared with a placed pipeline.
    _THREAD.ignores_to = True
    try:
        yield
    finally:
        _THREAD.ignores_to = False


def _wrap_call(kind: Any) -> Any:
    @functools.wraps(kind.__call__)
    def portable_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # kind.__call__ is looked up at every call because users and tests patch it.
        return run_call(self, require_placement(self), kind.__call__, args, kwargs)

    if hasattr(kind.__call__, "__wrapped__"):
        # The function without `torch.no_grad`, which training methods such as DRaFT call.
        @functools.wraps(kind.__call__.__wrapped__)
        def call_with_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
            return run_call(self, require_placement(self), kind.__call__.__wrapped__, args, kwargs)

        portable_call.__wrapped__ = call_with_gradients
    return portable_call


class DiffusionPipeline(Portable, diffusers.DiffusionPipeline):
    """A `diffusers.DiffusionPipeline` that loads any pipeline and supports every device."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **options: Any) -> Any:
        """Load a pipeline from a Hub ID, a local folder or a single file, with the options of diffusers.

        By default, only safetensors files are loaded, and a model that contains custom code is rejected.
        To change this, pass `use_safetensors=False` or `trust_remote_code=True`.

        With `device=`, the pipeline is placed on this device, with the options of `anyaccel.place`. Each component
        is moved there before the next one is loaded, so host memory holds at most one of them.
        """
        plain = vars(cls).get("_plain_class", diffusers.DiffusionPipeline)
        return load_portable(plain, pretrained_model_name_or_path, options)

    @classmethod
    def from_single_file(cls, pretrained_model_link_or_path: Any, **options: Any) -> Any:
        """Load a pipeline from a single checkpoint file.

        `config=` is the folder or Hub ID of a pipeline with the same architecture.
        """
        plain = vars(cls).get("_plain_class", diffusers.DiffusionPipeline)
        return load_portable(plain, pretrained_model_link_or_path, options)

    @classmethod
    def from_pipe(cls, pipeline: Any, **options: Any) -> Any:
        """Create a pipeline of this class from the components of another one, on the same device."""
        return derive_portable(vars(cls).get("_plain_class", plain_class(pipeline)), pipeline, options)


class ModularPipeline(Portable, diffusers.ModularPipeline):
    """A `diffusers.ModularPipeline` that is loaded with its components and supports every device."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **options: Any) -> Any:
        """Load a modular pipeline and its components from a Hub ID or a local folder.

        The options are those of diffusers' `from_pretrained` and `load_components`, such as `workflow=`, `dtype=` and
        `names=`. A component that is passed by name is used instead of the one in the folder. `device=` and custom
        code work as in `DiffusionPipeline.from_pretrained`.
        """
        plain = vars(cls).get("_plain_class", diffusers.ModularPipeline)
        return load_portable(plain, pretrained_model_name_or_path, options)


def load_portable(kind: Any, model: Any, options: dict[str, Any]) -> Any:
    """Load a pipeline with diffusers; place it if `options` name a device."""
    requested, device = take_placement_options(options), options.pop("device", None)
    if device is not None:
        return load_onto(kind, model, options, resolve_device(device, requested), requested)
    pipe, loading_options = load_pipeline(kind, model, options)
    quantize_models(find_models_to_quantize(pipe, requested.weights), requested.weights)
    store_options(make_portable(pipe), replace(loading_options, weights=requested.weights))
    return pipe


def load_onto(
    kind: Any,
    model: Any,
    options: dict[str, Any],
    opened: OpenDevice,
    requested: PlacementOptions,
    dtype: Decision[str] | None = None,
) -> Any:
    """Load a pipeline onto a device, one component after the other, and place it there.

    `options` are those of `from_pretrained`, and `requested` those of the placement. `dtype` is the dtype decision if
    one was already made.
    """
    options, requested, dtype = choose_loading_dtype(opened, options, requested, dtype)
    pipe, _ = load_pipeline(kind, model, options, LoadTarget(opened, requested))
    store_options(make_portable(pipe), requested)
    pipe.place_with_plan(opened, {}, dtype)
    return pipe


def derive_portable(kind: Any, pipeline: Any, options: dict[str, Any]) -> Any:
    """Create a pipeline from the components of another one, on the same device."""
    pipe, placement_options = derive_pipeline(kind, pipeline, options)
    if find_placement(make_portable(pipe)) is None:
        store_options(pipe, placement_options)
    return pipe


def place(pipe: Any, device: str | int | torch.device = "auto", **placement_options: Any) -> Any:
    """Place a diffusers pipeline on a device and return it: `place(pipe, "hpu", dtype="bf16")`."""
    if isinstance(pipe, type) or not hasattr(pipe, "components"):
        raise UsageError(
            f"cannot place {pipe!r:.60}: it is not a diffusers pipeline",
            hint="load a pipeline first, for example with anyaccel.DiffusionPipeline.from_pretrained(…)",
        )
    # A name: `to` casts all weights to a torch dtype, also those that should stay in float32.
    if isinstance(placement_options.get("dtype"), torch.dtype):
        placement_options["dtype"] = dtype_name(placement_options["dtype"])
    return make_portable(pipe).to(device, **placement_options)
