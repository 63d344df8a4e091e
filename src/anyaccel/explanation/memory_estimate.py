"""Memory estimate for a model on a device, which completes the plan of `anyaccel.explain`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from anyaccel.backends.registry import load_registry
from anyaccel.call_limits import check_multiple
from anyaccel.errors import AnyaccelError, ModelError
from anyaccel.explanation.call_arguments import (
    UNKNOWN_SIDE,
    CallSize,
    RequestedSize,
    accepts_size,
    find_default_size,
    find_frames_argument,
    find_sampling_rate,
    find_steps,
    is_prompt_only,
    make_call,
)
from anyaccel.explanation.device_argument import DeviceTarget
from anyaccel.explanation.largest_size import choose_largest_side, find_largest_size
from anyaccel.explanation.loading import forecast_loading
from anyaccel.explanation.parallel import choose_split, describe_gain, split_memory
from anyaccel.explanation.supported_size import find_supported_size
from anyaccel.planning.decision import Decision
from anyaccel.planning.facts import PipelineFacts
from anyaccel.planning.footprint import Measure
from anyaccel.planning.kernel_workspace import read_workspace
from anyaccel.planning.limit_hits import find_limit_hits
from anyaccel.planning.loading_memory import LoadingForecast
from anyaccel.planning.memory import (
    PLAIN,
    Forecast,
    MemoryRule,
    find_largest_batch,
    make_forecast,
    predict,
    predict_weights,
)
from anyaccel.planning.options import PlacementOptions
from anyaccel.planning.plan import Plan, without_rank_local_choices, without_speedups
from anyaccel.planning.speedups import choose_compile_policy
from anyaccel.planning.time_estimate import TimeEstimate, estimate_time
from anyaccel.planning.weight_formats import choose_weights
from anyaccel.planning.weight_kernels import choose_dequantized
from anyaccel.runtime.call.validation import find_size_multiple
from anyaccel.runtime.call_parameters import read_call_parameters
from anyaccel.runtime.durations import choose_frame_rate
from anyaccel.runtime.introspection import read_facts
from anyaccel.runtime.placement.memory_plan import list_pipeline_rules
from anyaccel.runtime.placement.quantized_layers import (
    find_models_to_quantize,
    quantize_models,
    replace_unsupported_layers,
)
from anyaccel.runtime.placement.row_split import split_traced_rows
from anyaccel.tracing.footprint_measurement import Measurement
from anyaccel.tracing.meta_pipeline import build_pipeline
from anyaccel.tracing.model_folder import ModelFolder
from anyaccel.tracing.pipeline_trace import PipelineTrace

__all__ = ["MemoryEstimate"]


class MemoryEstimate:
    """Memory estimate for a model on a device, computed from shapes with a pipeline on the meta device."""

    def __init__(
        self,
        folder: ModelFolder,
        target: DeviceTarget,
        plan: Plan,
        options: PlacementOptions,
        call_size: RequestedSize,
        size: CallSize | None = None,
    ) -> None:
        self.folder, self.target, self.plan, self.options = folder, target, plan, options
        self.traced = PipelineTrace()
        self.full = build_pipeline(
            folder, "meta", getattr(torch, plan.dtype.value), self.traced.wrap_model, self.traced.wrap_replacement
        )
        self.facts = self._quantize()
        plan = replace(
            plan,
            weights=choose_weights(self.facts, options),
            dequantized=choose_dequantized(target.sheet, self.facts, virtual=target.virtual),
            compile_policy=choose_compile_policy(target.sheet, self.facts, options, plan.workarounds.value),
            parallel=choose_split(target, self.facts, options, plan.dtype.value),
        )
        self.plan = plan if plan.parallel.value is None else without_rank_local_choices(plan)
        # Audio and some video pipelines have no image size.
        self.takes_size = accepts_size(self.full.pipe)
        self.requested = call_size
        self.size = size or self._choose_size(call_size)
        self._first = self._make_measurement()
        # Measurements by size; the search for the largest size needs several.
        self._measured = {self.size: self._first}

    def _quantize(self) -> PipelineFacts:
        """Quantize the models as `place` does, and return the facts of the models whose memory is counted."""
        pipe, unknown = self.full.pipe, self.traced.not_included
        found = find_models_to_quantize(pipe, self.options.weights)
        found = {name: model for name, model in found.items() if name not in unknown}
        quantize_models(found, self.options.weights)
        replace_unsupported_layers(found, self.target.sheet, virtual=self.target.virtual)
        facts = read_facts(pipe)
        return replace(facts, components=tuple(c for c in facts.components if c.name not in unknown))

    def _choose_size(self, requested: RequestedSize) -> CallSize:
        """Return the requested size of the call, or the pipeline's default."""
        pipe = self.full.pipe
        call_size = requested.assign(pipe, self.folder.pipeline)
        if not self.takes_size:
            return call_size
        for name, side in (("width", requested.width), ("height", requested.height)):
            if side is not None:
                check_multiple(name, side, find_size_multiple(pipe) or 1)
        width, height = requested.width or requested.height, requested.height or requested.width
        size = find_default_size(pipe) if width is None or height is None else (width, height)
        return replace(call_size, size=size)

    def make_plan(self, batch: int) -> Plan:
        """Return the plan for a batch size, including the memory forecast."""
        capacity, sheet = self.target.capacity_bytes, self.target.sheet
        supported = self._settle_size(batch)
        measure = self.measure(self.size)
        sharded = self._shard(measure)
        decision, forecast = self._make_forecast(sharded, batch)
        with self._translating_errors():
            measure(PLAIN, 1)  # fills `measure.trace_facts`, which the limits below come from
        product, mode = self.target.product, self.plan.mode.value
        limits = find_limit_hits(sheet, measure.trace_facts, batch, product=product, mode=mode)
        rule, output = decision.value, measure.output
        fps = self._find_frame_rate() if output.kind == "video" else None
        not_included = self.full.not_included
        forecast = replace(
            forecast,
            size=self.size.size,
            kind=output.kind,
            frames=output.frames,
            fps=fps,
            seconds=self._find_seconds(measure, fps),
            not_included=tuple(missing.name for missing in not_included),
            largest_batch=find_largest_batch(sharded, rule, capacity) if rule else 0,
            largest_size=self._find_largest_size(sharded, capacity, rule),
            largest_tried_side=self._choose_largest_side(),
            time=self._estimate_time(measure, rule, batch),
            limits=limits,
            loading=self._forecast_loading(forecast, rule),
            prompt_only=is_prompt_only(self.full.recipe.call()),
            notes=(
                *(f"{missing.name} ({missing.kind}) is not included: {missing.reason}" for missing in not_included),
                *supported,
                *self.target.notes,
                *self._describe_gain(measure, rule),
            ),
        )
        memory: Decision[Any] = Decision(rule if rule else "does not fit", decision.reason)
        plan = self.plan if rule is None or rule.residence == "resident" else without_speedups(self.plan)
        return replace(plan, memory=memory, forecast=forecast)

    def _find_frame_rate(self) -> float | None:
        """Return the frame rate of the video, or None if it is unknown."""
        call = {"fps": self.requested.fps} if self.requested.fps is not None else {}
        fps, guess = choose_frame_rate(self.folder.pipeline, read_call_parameters(self.full.pipe), call)
        return None if guess else fps

    def _find_seconds(self, measure: Measurement, fps: float | None) -> float | None:
        """Return the duration of the audio or the video, or None if it is unknown."""
        output, rate = measure.output, find_sampling_rate(self.full.pipe)
        if output.kind == "video":
            return output.frames / fps if output.frames and fps else None
        return output.samples / rate if output.samples and rate else None

    def _estimate_time(self, measure: Measurement, rule: MemoryRule | None, batch: int) -> TimeEstimate | None:
        """Return the estimated time of a call, or None if weights are split or quantized."""
        steps, product = find_steps(self.full.pipe, self.requested.steps), self.target.product
        if rule is None or steps is None or product is None:
            return None
        if self.plan.weights.value or self.plan.parallel.value is not None:
            return None
        footprint = measure(rule.savings, batch, rule.images_per_call)
        product_facts = self.target.sheet.product(product)
        return estimate_time(footprint, steps, product_facts, self.plan.dtype.value, rule.residence)

    def with_weights(self, weights: str) -> MemoryEstimate:
        """Return the estimate for a format of quantized weights."""
        options = replace(self.options, weights=weights)
        estimate = MemoryEstimate(self.folder, self.target, self.plan, options, self.requested, self.size)
        plain = [component.name for component in estimate.facts.components if component.weight_error is None]
        # Tracing a video decoder takes seconds.
        estimate.traced.reuse_calls(self.traced, [*plain, *self.traced.not_included])
        return estimate

    def forecast(self, batch: int) -> tuple[Decision[MemoryRule | None], Forecast]:
        """Return the memory settings for a batch size, and the forecast without larger sizes, limits and notes."""
        self._settle_size(batch)
        return self._make_forecast(self._shard(self.measure(self.size)), batch)

    def _make_forecast(self, measure: Measure, batch: int) -> tuple[Decision[MemoryRule | None], Forecast]:
        with self._translating_errors():
            return make_forecast(measure, batch, self.target.capacity_bytes, self.rules(batch))

    @contextmanager
    def _translating_errors(self) -> Iterator[None]:
        try:
            yield
        except AnyaccelError:
            raise
        except Exception as error:
            raise self._make_error(error) from error

    def _forecast_loading(self, forecast: Forecast, rule: MemoryRule | None) -> LoadingForecast | None:
        models = [name for name, _ in forecast.components]
        # Processes that share a model load only their part of it.
        if forecast.not_included or self.plan.parallel.value is not None or self.folder.missing_bytes(models) != 0:
            return None
        dtype = getattr(torch, self.plan.dtype.value)
        folders = {name: self.folder.find_folder(name) for name in models}
        return forecast_loading(folders, dtype, self.target.sheet, rule, self.options)

    def _settle_size(self, batch: int) -> tuple[str, ...]:
        """Trace the first call, which shows its size. Return a note if the config does not support the default size."""
        note: tuple[str, ...] = ()
        error = self._try(self.size, batch)
        if error is not None:
            sizes = (self.size, replace(self.size, short=True))
            supported = next((found for size in sizes if (found := self._find_supported(size, batch))), None)
            if supported is None or not self.requested.is_default:
                raise self._make_error(error, supported) from error
            what = "length of prompts or audio" if supported.size == self.size.size else f"size, {self.size}"
            note = (f"the config of this model does not support the default {what}; assuming one that it supports",)
            self.size = supported
        if self.takes_size and self.size.size is None:
            measured = self._measured.pop(self.size)
            self.size = replace(self.size, size=measured.output.size or (UNKNOWN_SIDE, UNKNOWN_SIDE))
            if measured.output.size is not None:
                self._measured[self.size] = measured
        return note

    def _try(self, size: CallSize, batch: int) -> Exception | None:
        """Trace a call of this size; return the exception that it raises, if any."""
        rule = self.rules(batch)[0]
        try:
            self.measure(size)(rule.savings, batch, rule.images_per_call)
        except AnyaccelError:
            raise
        except Exception as error:  # noqa: BLE001 - models reject a size with many kinds of errors
            return error
        return None

    def _find_supported(self, size: CallSize, batch: int) -> CallSize | None:
        """Return the largest size up to `size` that can be traced, or None."""
        if self._try(size, batch) is None:
            return size
        call = self.full.recipe.call()
        argument = find_frames_argument(self.full.pipe)
        return find_supported_size(lambda size: self._try(size, batch) is None, size, call, argument)

    def _make_error(self, error: Exception, supported: CallSize | None = None) -> ModelError:
        """Return the error for a call that cannot be traced."""
        if supported is not None:
            return ModelError(
                f"the config of this model does not support {self.size}: {type(error).__name__}: {error}",
                hint=f"the largest size with this aspect ratio that it supports is {supported}",
            )
        if self.full.not_included:
            return self.full.not_included[0].make_error(self.folder.pipeline)
        return ModelError(
            f"cannot trace {self.folder.pipeline} with meta tensors: {type(error).__name__}: {error}",
            hint="set ANYACCEL_TRACEBACK=1 to print the traceback, or run `anyaccel check`, which uses a small "
            "version of the model",
        )

    def rules(self, batch: int) -> list[MemoryRule]:
        """Return the memory modes to try for a batch, fastest first."""
        images_per_call, unified = self.plan.images_per_call.value, self.target.sheet.unified_memory
        split = self.plan.parallel.value
        sharded = split is not None and split.strategy == "tensor"
        options = replace(self.options, memory="resident") if sharded else self.options  # shards cannot be offloaded
        return list_pipeline_rules(self.full.pipe, batch, images_per_call, options, unified_memory=unified)

    def measure(self, size: CallSize) -> Measurement:
        """Return the memory measurement for one size of the call; measurements are cached."""
        if size not in self._measured:
            arguments = functools.partial(make_call, self.full, size)
            self._measured[size] = self._first.of_another_call(arguments, size.size)
        return self._measured[size]

    def _shard(self, measure: Measure) -> Measure:
        return split_memory(measure, self.facts, self.plan.parallel.value)

    def _describe_gain(self, measure: Measurement, rule: MemoryRule | None) -> tuple[str, ...]:
        resident, requested = rule is not None and rule.residence == "resident", self.options.parallel is not None
        sequences = measure.trace_facts.sequences
        return describe_gain(self.target, self.facts, measure, sequences, resident=resident, requested=requested)

    def _make_measurement(self) -> Measurement:
        return Measurement(
            self.full.pipe,
            self.traced,
            read_workspace(self.target.sheet, virtual=self.target.virtual),
            denoisers=self.facts.denoisers,
            arguments=functools.partial(make_call, self.full, self.size),
            attention=self.plan.attention.value,
            split_rows=split_traced_rows(self.full.pipe, self.facts.denoisers),
            size=self.size.size,
            unified_memory=self.target.sheet.unified_memory,
            is_host=self.target.sheet.is_host,
            fetches_ahead=load_registry().backend(self.target.sheet.name).driver.has_events,
        )

    def _choose_largest_side(self) -> int:
        default = find_default_size(self.full.pipe) if self.takes_size else self.size.size
        return choose_largest_side(default, is_video=self._measured[self.size].output.kind == "video")

    def _find_largest_size(self, measure: Measure, capacity: int, chosen: MemoryRule | None) -> tuple[int, int] | None:
        """Return the largest image size that fits at the requested aspect ratio, or None.

        The size is for a single image, in the memory mode that needs the least memory. `measure` and the chosen memory
        mode are those of the requested size.
        """
        size = self.size.size
        if size is None:
            return None
        rule = self.rules(1)[-1]  # the last rule needs the least memory
        known = measure((chosen or rule).savings, 1)

        def need(size: tuple[int, int]) -> int | None:
            try:
                another = self._shard(self.measure(replace(self.size, size=size)))
                return max(predict(another(rule.savings, 1), rule.residence).values())
            except Exception:  # noqa: BLE001 - pipelines reject a size with many kinds of errors
                return None

        largest = find_largest_size(
            need,
            size,
            capacity,
            self._choose_largest_side(),
            fixed_bytes=predict_weights(known, rule.residence),
            requested_bytes=max(predict(known, rule.residence).values()),
        )
        # The requested size may lie between two steps of the search and still fit.
        return max(largest or size, size) if chosen else largest
