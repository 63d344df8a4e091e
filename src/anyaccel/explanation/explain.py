"""`anyaccel.explain`: the plan for a model on a device, and what it will hold, from the model's small files alone."""

from __future__ import annotations

import inspect
import os
from dataclasses import replace
from typing import Any

import torch

from anyaccel.backends.device_functions import dtype_name
from anyaccel.backends.half_precision_probe import measure_half_precision
from anyaccel.backends.registry import load_registry
from anyaccel.call_limits import check_batch, check_multiple, check_side
from anyaccel.errors import AnyaccelError, ModelError
from anyaccel.explanation.device_target import DeviceTarget, find_device_target
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
from anyaccel.runtime.call.validation import find_multiple
from anyaccel.runtime.introspection import read_facts
from anyaccel.runtime.placement.memory_plan import find_default_side, list_pipeline_rules
from anyaccel.tracing.footprint_measurement import Measurement
from anyaccel.tracing.meta_pipeline import FullSizePipeline, build_pipeline
from anyaccel.tracing.model_index import ModelFolder
from anyaccel.tracing.pipeline_trace import PipelineTrace

__all__ = ["explain"]

_STEPS = 2
_NOT_ASKED = ("generator", "num_inference_steps", "guidance_scale", "max_sequence_length", "output_type", "callback")
"""Arguments of a recipe that are left to the pipeline's own defaults."""


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
    """The plan for a model on a device that need not be here, without its weights: `plan.forecast` has the memory.

    `device` is a name, a product or a name with a memory: `hpu`, `gaudi2`, `mps:16GiB`. Further keywords are the wishes
    that `anyaccel.place` takes.
    """
    batch = check_batch(batch)
    width, height = (
        side if side is None else check_side(name, side) for name, side in (("width", width), ("height", height))
    )
    types = {"dtype": dtype, "smallest_dtype": options.pop("smallest_dtype", None)}
    wished = read_options({**options, **{name: dtype_name(one) for name, one in types.items() if one is not None}})
    target = find_device_target(device)
    check_residence(wished.memory, unified_memory=target.sheet.unified_memory)
    folder = find_model(model, revision)
    plan = _answer(folder, target, wished, width, height, batch)
    smaller = find_smaller_dtype(target.sheet, plan.dtype.value, wished)
    if smaller is None or plan.forecast is None or plan.forecast.fits:
        return plan
    reason = f"smallest_dtype={smaller!r} allows it, and {plan.dtype.value} does not fit: {plan.memory.reason}"
    other = _answer(folder, target, replace(wished, dtype=smaller), width, height, batch)
    return replace(other, dtype=Decision(smaller, reason))


def _answer(
    folder: ModelFolder,
    target: DeviceTarget,
    options: PlacementOptions,
    width: int | None,
    height: int | None,
    batch: int,
) -> Plan:
    plan = _plan(folder, target, options)
    # Building models from their configs and running them once has advice for people who train them only.
    with quiet_libraries(everything=True):
        return _MemoryEstimate(folder, target, plan, options, width, height).answer(batch)


def _plan(folder: ModelFolder, target: DeviceTarget, options: PlacementOptions) -> Plan:
    """Everything that does not depend on a size."""
    components = tuple(
        ComponentFacts(name=one.name, kind=one.kind, dtype="float32", parameters=0, denoises=False)
        for one in folder.components
        if one.config is not None
    )
    on_host = target.sheet.is_host
    return make_plan(
        target.sheet,
        PipelineFacts(pipeline=folder.pipeline, components=components),
        replace(options, parallel=None),  # which depends on the models, and is decided once they are built
        device=target.name,
        virtual=target.virtual,
        half_precision_cost=measure_half_precision() if on_host and options.dtype is None else None,
        environment=os.environ,
    )


class _MemoryEstimate:
    """One model on one device, built with shapes alone."""

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
        self.full = build_pipeline(folder, "meta", getattr(torch, plan.dtype.value), self.traced.shell)
        self.facts = read_facts(self.full.pipe)
        plan = replace(
            plan,
            compile_policy=choose_compile_policy(target.sheet, self.facts, options, plan.workarounds.value),
            parallel=choose_split(target, self.facts, options, plan.dtype.value),
        )
        self.plan = plan if plan.parallel.value is None else without_rank_local_choices(plan)
        self.takes_size = {"height", "width"} <= set(inspect.signature(self.full.pipe.__call__).parameters)
        for name, side in (("width", width), ("height", height)):
            if self.takes_size and side is not None:
                check_multiple(name, side, find_multiple(self.full.pipe) or 1)
        side = find_default_side(self.full.pipe)
        self.size = (width or height or side, height or width or side)
        self._first = self._make_measurement()
        self._measured = {self.size: self._first}

    def answer(self, batch: int) -> Plan:
        """The plan with its forecast."""
        capacity, sheet = self.target.capacity_bytes, self.target.sheet
        measure = self.measure(self.size)
        shared = self._share(measure)
        rules = self.rules(batch)
        try:
            decision, forecast = make_forecast(shared, batch, capacity, rules)
            measure(PLAIN, 1)
        except AnyaccelError:
            raise
        except Exception as error:
            raise ModelError(
                f"{self.folder.pipeline} cannot be run with shapes alone: {type(error).__name__}: {error}",
                hint="ANYACCEL_TRACEBACK=1 shows where; `anyaccel check` runs it small",
            ) from error
        product, mode = self.target.product, self.plan.mode.value
        limits = find_limit_hits(sheet, measure.seen, batch, product=product, mode=mode)
        rule = decision.value
        forecast = replace(
            forecast,
            largest_batch=find_largest_batch(shared, rule, capacity) if rule else 0,
            largest_size=self._find_largest_size(capacity, fits=rule is not None),
            limits=limits,
            offers=list_quantization_options(sheet, self.facts, forecast, self.plan.dtype.value),
            notes=(*self.target.notes, *self._tell_gain(measure, rule)),
        )
        memory: Decision[Any] = Decision(rule if rule else "does not fit", decision.reason)
        return replace(self.plan, memory=memory, forecast=forecast)

    def rules(self, batch: int) -> list[MemoryRule]:
        """The ways to run so many images, the cheapest first."""
        at_once, unified = self.plan.images_per_call.value, self.target.sheet.unified_memory
        split = self.plan.parallel.value
        whole = split is not None and split.strategy == "tensor"  # what is split cannot come and go
        options = replace(self.options, memory="resident") if whole else self.options
        return list_pipeline_rules(self.full.pipe, batch, at_once, options, unified_memory=unified)

    def measure(self, size: tuple[int, int]) -> Measurement:
        """What measures calls of one size."""
        if size not in self._measured:
            self._measured[size] = self._first.of_another_call(lambda images: _make_call(self.full, size, images), size)
        return self._measured[size]

    def _share(self, measure: Measure) -> Measure:
        return split_memory(measure, self.facts, self.plan.parallel.value)

    def _tell_gain(self, measure: Measurement, rule: MemoryRule | None) -> tuple[str, ...]:
        resident, asked = rule is not None and rule.residence == "resident", self.options.parallel is not None
        sequences = measure.seen.sequences
        return describe_gain(self.target, self.facts, measure, sequences, resident=resident, asked=asked)

    def _make_measurement(self) -> Measurement:
        size = self.size if self.takes_size else None
        return Measurement(
            self.full.pipe,
            self.traced,
            read_workspace(self.target.sheet, virtual=self.target.virtual),
            denoisers=self.facts.denoisers,
            arguments=lambda images: _make_call(self.full, size, images),
            attention=self.plan.attention.value,
            size=size,
            unified_memory=self.target.sheet.unified_memory,
            fetches_ahead=load_registry().backend(self.target.sheet.name).driver.marks,
        )

    def _find_largest_size(self, capacity: int, *, fits: bool) -> tuple[int, int] | None:
        """The largest single picture of the asked one's shape that fits by whatever rule: the last holds least."""
        if not self.takes_size:
            return None
        rule = self.rules(1)[-1]

        def need(size: tuple[int, int]) -> int | None:
            try:
                return max(predict(self._share(self.measure(size))(rule.savings, 1), rule.residence).values())
            except Exception:  # noqa: BLE001 - whatever a pipeline raises at a size: it is none that it makes
                return None

        found = find_largest_size(need, self.size, capacity)
        return max(found or self.size, self.size) if fits else found  # the asked one may lie between two steps


def _make_call(full: FullSizePipeline, size: tuple[int, int] | None, images: int) -> dict[str, Any]:
    """One call of a pipeline: its recipe's, at the asked size, with the pipeline's own defaults for the rest."""
    takes = inspect.signature(full.pipe.__call__).parameters
    call = {name: value for name, value in full.recipe.call().items() if name not in _NOT_ASKED}
    call = {name: _resize(value, size) for name, value in call.items()}
    wanted: dict[str, Any] = {"num_inference_steps": _STEPS, "output_type": "pt"}
    if size is not None:
        wanted |= {"width": size[0], "height": size[1]}
    per_prompt = next((name for name in takes if name.startswith("num_") and name.endswith("_per_prompt")), None)
    if per_prompt is not None:
        wanted[per_prompt] = images
    elif "batch_size" in takes:
        wanted["batch_size"] = images
    elif isinstance(call.get("prompt"), str):
        wanted["prompt"] = [call["prompt"]] * images
    return call | {name: value for name, value in wanted.items() if name in takes}


def _resize(value: Any, size: tuple[int, int] | None) -> Any:
    """A picture at the asked size."""
    if size is not None and hasattr(value, "resize") and hasattr(value, "mode"):
        return value.resize(size)
    return value
