"""`anyaccel.explain`: plan and memory forecast for a model on a device, from its config files only."""

from __future__ import annotations

import inspect
import os
from dataclasses import replace
from typing import Any

import torch

from anyaccel.backends.cpu_half_precision_speed import measure_half_precision
from anyaccel.backends.device_functions import dtype_name
from anyaccel.backends.registry import load_registry
from anyaccel.call_limits import check_batch, check_multiple, check_side
from anyaccel.errors import AnyaccelError, ModelError
from anyaccel.explanation.device_argument import DeviceTarget, find_device_target
from anyaccel.explanation.largest_size import find_largest_size
from anyaccel.explanation.model_configs import find_model
from anyaccel.explanation.parallel import choose_split, describe_gain, split_memory
from anyaccel.explanation.quantization_options import list_quantization_options
from anyaccel.library_logging import quiet_libraries
from anyaccel.planning.decision import Decision
from anyaccel.planning.dtype import find_smaller_dtype
from anyaccel.planning.facts import ComponentFacts, PipelineFacts
from anyaccel.planning.footprint import Measure
from anyaccel.planning.kernel_workspace import read_workspace
from anyaccel.planning.limit_hits import find_limit_hits
from anyaccel.planning.memory import (
    PLAIN,
    MemoryRule,
    find_largest_batch,
    make_forecast,
    predict,
)
from anyaccel.planning.options import PlacementOptions, check_residence, read_options
from anyaccel.planning.plan import Plan, make_plan, without_rank_local_choices
from anyaccel.planning.speedups import choose_compile_policy
from anyaccel.runtime.call.validation import find_size_multiple
from anyaccel.runtime.introspection import read_facts
from anyaccel.runtime.placement.memory_plan import find_default_side, list_pipeline_rules
from anyaccel.runtime.placement.row_split import split_traced_rows
from anyaccel.tracing.footprint_measurement import Measurement
from anyaccel.tracing.meta_pipeline import FullSizePipeline, build_pipeline
from anyaccel.tracing.model_folder import ModelFolder
from anyaccel.tracing.pipeline_trace import PipelineTrace

__all__ = ["explain"]

# Denoising steps of the traced call.
_STEPS = 2
# Arguments of a recipe that the pipeline's own defaults replace, because a recipe sets them for speed.
_LEFT_TO_DEFAULTS = (
    "generator",
    "num_inference_steps",
    "guidance_scale",
    "max_sequence_length",
    "output_type",
    "callback",
)


def explain(
    model: str | os.PathLike[str],
    device: str = "auto",
    *,
    height: int | None = None,
    width: int | None = None,
    batch: int = 1,
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    **options: Any,
) -> Plan:
    """Return the plan for a model on a device, with the memory use in `plan.forecast`.

    Neither the weights nor the device has to be on this machine. `device` is a name, a product, or a name with a
    memory size: `hpu`, `gaudi2`, `mps:16GiB`. Additional keyword arguments are the same as for `anyaccel.place`.
    """
    batch = check_batch(batch)
    width, height = (
        side if side is None else check_side(name, side) for name, side in (("width", width), ("height", height))
    )
    dtypes = {"dtype": dtype, "smallest_dtype": options.pop("smallest_dtype", None)}
    dtype_options = {name: dtype_name(value) for name, value in dtypes.items() if value is not None}
    requested = read_options({**options, **dtype_options})
    target = find_device_target(device)
    check_residence(requested.memory, unified_memory=target.sheet.unified_memory)
    folder = find_model(model, revision)
    plan = _explain_once(folder, target, requested, width, height, batch)
    # A smaller dtype is used only if the default one does not fit and the caller allows it.
    smaller = find_smaller_dtype(target.sheet, plan.dtype.value, requested)
    if smaller is None or plan.forecast is None or plan.forecast.fits:
        return plan
    reason = f"allowed by smallest_dtype={smaller!r}; {plan.dtype.value} does not fit: {plan.memory.reason}"
    smaller_plan = _explain_once(folder, target, replace(requested, dtype=smaller), width, height, batch)
    return replace(smaller_plan, dtype=Decision(smaller, reason))


def _explain_once(
    folder: ModelFolder,
    target: DeviceTarget,
    options: PlacementOptions,
    width: int | None,
    height: int | None,
    batch: int,
) -> Plan:
    plan = _plan_without_size(folder, target, options)
    # Libraries log training advice when models are built from configs and run once.
    with quiet_libraries(everything=True):
        return _MemoryEstimate(folder, target, plan, options, width, height).make_plan(batch)


def _plan_without_size(folder: ModelFolder, target: DeviceTarget, options: PlacementOptions) -> Plan:
    """Return a plan with the decisions that do not depend on the image size."""
    components = tuple(
        ComponentFacts(name=component.name, kind=component.kind, dtype="float32", parameters=0, denoises=False)
        for component in folder.components
        if component.config is not None
    )
    on_cpu = target.sheet.is_host
    return make_plan(
        target.sheet,
        PipelineFacts(pipeline=folder.pipeline, components=components),
        replace(options, parallel=None),  # decided once the models are built, because it depends on them
        device=target.name,
        virtual=target.virtual,
        half_precision_cost=measure_half_precision() if on_cpu and options.dtype is None else None,
        environment=os.environ,
    )


class _MemoryEstimate:
    """Memory estimate for a model on a device, computed from shapes with a pipeline on the meta device."""

    def __init__(
        self,
        folder: ModelFolder,
        target: DeviceTarget,
        plan: Plan,
        options: PlacementOptions,
        width: int | None,
        height: int | None,
    ) -> None:
        self.folder, self.target, self.plan, self.options = folder, target, plan, options
        self.traced = PipelineTrace()
        self.full = build_pipeline(folder, "meta", getattr(torch, plan.dtype.value), self.traced.wrap_model)
        self.facts = read_facts(self.full.pipe)
        plan = replace(
            plan,
            compile_policy=choose_compile_policy(target.sheet, self.facts, options, plan.workarounds.value),
            parallel=choose_split(target, self.facts, options, plan.dtype.value),
        )
        self.plan = plan if plan.parallel.value is None else without_rank_local_choices(plan)
        # Audio and some video pipelines have no image size.
        self.takes_size = {"height", "width"} <= set(inspect.signature(self.full.pipe.__call__).parameters)
        for name, side in (("width", width), ("height", height)):
            if self.takes_size and side is not None:
                check_multiple(name, side, find_size_multiple(self.full.pipe) or 1)
        side = find_default_side(self.full.pipe)
        self.size = (width or height or side, height or width or side)
        self._first = self._make_measurement()
        # Measurements by size; the search for the largest size needs several.
        self._measured = {self.size: self._first}

    def make_plan(self, batch: int) -> Plan:
        """Return the plan for a batch size, including the memory forecast."""
        capacity, sheet = self.target.capacity_bytes, self.target.sheet
        measure = self.measure(self.size)
        sharded = self._shard(measure)
        rules = self.rules(batch)
        try:
            decision, forecast = make_forecast(sharded, batch, capacity, rules)
            measure(PLAIN, 1)  # fills `measure.seen`, which the limits below come from
        except AnyaccelError:
            raise
        except Exception as error:
            raise ModelError(
                f"cannot trace {self.folder.pipeline} with meta tensors: {type(error).__name__}: {error}",
                hint="set ANYACCEL_TRACEBACK=1 to print the traceback, or run `anyaccel check`, which uses a small "
                "version of the model",
            ) from error
        product, mode = self.target.product, self.plan.mode.value
        limits = find_limit_hits(sheet, measure.trace_facts, batch, product=product, mode=mode)
        rule = decision.value
        forecast = replace(
            forecast,
            largest_batch=find_largest_batch(sharded, rule, capacity) if rule else 0,
            largest_size=self._find_largest_size(capacity, fits=rule is not None),
            limits=limits,
            offers=list_quantization_options(sheet, self.facts, forecast, self.plan.dtype.value),
            notes=(*self.target.notes, *self._describe_gain(measure, rule)),
        )
        memory: Decision[Any] = Decision(rule if rule else "does not fit", decision.reason)
        return replace(self.plan, memory=memory, forecast=forecast)

    def rules(self, batch: int) -> list[MemoryRule]:
        """Return the memory modes to try for a batch, fastest first."""
        images_per_call, unified = self.plan.images_per_call.value, self.target.sheet.unified_memory
        split = self.plan.parallel.value
        sharded = split is not None and split.strategy == "tensor"
        options = replace(self.options, memory="resident") if sharded else self.options  # shards cannot be offloaded
        return list_pipeline_rules(self.full.pipe, batch, images_per_call, options, unified_memory=unified)

    def measure(self, size: tuple[int, int]) -> Measurement:
        """Return the memory measurement for one image size; measurements are cached."""
        if size not in self._measured:
            self._measured[size] = self._first.of_another_call(lambda images: _make_call(self.full, size, images), size)
        return self._measured[size]

    def _shard(self, measure: Measure) -> Measure:
        return split_memory(measure, self.facts, self.plan.parallel.value)

    def _describe_gain(self, measure: Measurement, rule: MemoryRule | None) -> tuple[str, ...]:
        resident, requested = rule is not None and rule.residence == "resident", self.options.parallel is not None
        sequences = measure.trace_facts.sequences
        return describe_gain(self.target, self.facts, measure, sequences, resident=resident, requested=requested)

    def _make_measurement(self) -> Measurement:
        size = self.size if self.takes_size else None
        return Measurement(
            self.full.pipe,
            self.traced,
            read_workspace(self.target.sheet, virtual=self.target.virtual),
            denoisers=self.facts.denoisers,
            arguments=lambda images: _make_call(self.full, size, images),
            attention=self.plan.attention.value,
            split_rows=split_traced_rows(self.full.pipe, self.facts.denoisers),
            size=size,
            unified_memory=self.target.sheet.unified_memory,
            is_host=self.target.sheet.is_host,
            fetches_ahead=load_registry().backend(self.target.sheet.name).driver.has_events,
        )

    def _find_largest_size(self, capacity: int, *, fits: bool) -> tuple[int, int] | None:
        """Return the largest image size that fits at the requested aspect ratio, or None.

        The size is for a single image, in the memory mode that needs the least memory.
        """
        if not self.takes_size:
            return None
        rule = self.rules(1)[-1]  # the last rule needs the least memory

        def need(size: tuple[int, int]) -> int | None:
            try:
                return max(predict(self._shard(self.measure(size))(rule.savings, 1), rule.residence).values())
            except Exception:  # noqa: BLE001 - pipelines reject a size with many kinds of errors
                return None

        largest = find_largest_size(need, self.size, capacity)
        # The requested size may lie between two steps of the search and still fit.
        return max(largest or self.size, self.size) if fits else largest


def _make_call(full: FullSizePipeline, size: tuple[int, int] | None, images: int) -> dict[str, Any]:
    """Return call arguments from the model's recipe for `images` images of the given or default size."""
    parameters = inspect.signature(full.pipe.__call__).parameters
    call = {name: value for name, value in full.recipe.call().items() if name not in _LEFT_TO_DEFAULTS}
    call = {name: _resize(value, size) for name, value in call.items()}
    arguments: dict[str, Any] = {"num_inference_steps": _STEPS, "output_type": "pt"}
    if size is not None:
        arguments |= {"width": size[0], "height": size[1]}
    per_prompt = next((name for name in parameters if name.startswith("num_") and name.endswith("_per_prompt")), None)
    if per_prompt is not None:
        arguments[per_prompt] = images
    elif "batch_size" in parameters:
        arguments["batch_size"] = images
    elif isinstance(call.get("prompt"), str):
        arguments["prompt"] = [call["prompt"]] * images
    return call | {name: value for name, value in arguments.items() if name in parameters}


def _resize(value: Any, size: tuple[int, int] | None) -> Any:
    """Resize a PIL image to `size`; return any other value unchanged."""
    if size is not None and hasattr(value, "resize") and hasattr(value, "mode"):
        return value.resize(size)
    return value
