"""The call: admitted, split where batches are not reliable, run inside the seams, watched, put together again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from anyaccel.backends.torch_device import is_host
from anyaccel.errors import DoesNotFitError, NotFiniteError, UsageError
from anyaccel.library_logging import FLOAT32_ADVICE, drop_log_records
from anyaccel.planning.decision import Decision
from anyaccel.planning.plan import Plan
from anyaccel.runtime.batch_split import SharedProgress, join_results
from anyaccel.runtime.call.validation import validate_call
from anyaccel.runtime.call_request import CallRequest, read_call_request
from anyaccel.runtime.distributed.parallel import run_split, share_noise
from anyaccel.runtime.introspection import find_components
from anyaccel.runtime.placement.oom_retry import run_within_memory, weights_on_cpu
from anyaccel.runtime.placement.place import fall_back_in_dtype, keep_float32, place_newcomers
from anyaccel.runtime.placement_state import Placement, find_placement
from anyaccel.runtime.speed.compile import compile_cache_env, record_shape
from anyaccel.runtime.speed.quantize import is_quantized
from anyaccel.runtime.speed.session import apply_speedups
from anyaccel.runtime.workarounds.function_modes import make_pipeline_function_mode, preserve_function_modes
from anyaccel.runtime.workarounds.model_inputs import find_input_adapters, set_input_adapters
from anyaccel.runtime.workarounds.nan_check import (
    OutputCheck,
    checking_outputs,
    find_first_non_finite,
    find_non_finite,
    warn_safety_checker,
)
from anyaccel.runtime.workarounds.noise import (
    BatchSliceNoise,
    NoiseSource,
    PerImageNoise,
    make_generators,
    use_noise_source,
)
from anyaccel.runtime.workarounds.overlapped_copy import find_overlapped_copy
from anyaccel.runtime.workarounds.scheduler_on_cpu import keep_on_cpu
from anyaccel.upstream.diffusers_internals import is_argument_error

__all__ = ["run_call"]

Call = Callable[..., Any]


def run_call(pipe: Any, placement: Placement, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one call of a pipeline as its plan says."""
    while True:
        with placement.lock:  # a second thread waits: a pipeline has one scheduler
            current = find_placement(pipe) or placement
            if current is placement:
                if placement.running:  # a pipeline inside a pipeline, or a callback that calls it again
                    kwargs.pop("seed", None)
                    return call(pipe, *args, **kwargs)
                return _run_alone(pipe, placement, call, args, kwargs)
        placement = current  # the pipeline was placed anew while this thread waited


def _run_alone(pipe: Any, placement: Placement, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    request = read_call_request(pipe, call, args, kwargs)
    validate_call(placement, request)
    place_newcomers(pipe, placement)
    split = placement.plan.parallel.value
    if split is not None:
        request = share_noise(request)
    draws = _Draws(request)

    def run(part: CallRequest, first: int, parts: int) -> Any:
        if parts > 1 and (placement.progress is None or placement.progress.calls != parts):
            placement.progress = SharedProgress(parts)
        record_shape(placement, part)
        placement.running = True
        try:
            with apply_speedups(pipe, placement, part):
                return run_split(
                    pipe, split, _CallRun(pipe, placement, call, part, draws.take(first, part.images)).finish
                )
        finally:
            _set_idle(pipe, placement)

    try:
        results = [run(request, 0, 1)] if placement.shared else run_within_memory(pipe, placement, request, run)
    except DoesNotFitError as error:
        if placement.shared or split is not None or not fall_back_in_dtype(pipe, placement, error):
            raise
        draws.rewind()
        smaller = find_placement(pipe)
        assert smaller is not None
        return _run_alone(pipe, smaller, call, args, kwargs)
    finally:
        if placement.progress is not None:
            placement.progress.close()
        placement.progress = None
        _set_idle(pipe, placement)
    result = join_results(results)
    if placement.plan.check_finite.value:
        warn_safety_checker(result)
    _label(result, placement, request)
    return result


def _set_idle(pipe: Any, placement: Placement) -> None:
    """Note that no call runs; a callback may have placed the pipeline anew meanwhile."""
    current = find_placement(pipe)
    placement.running = False
    if current is not None and current is not placement:
        current.running, current.progress = False, None


def _label(result: Any, placement: Placement, request: CallRequest) -> None:
    """A result carries its plan and its seeds, where it is an object that can."""
    if hasattr(result, "to_tuple"):
        plan = replace(placement.plan, report=replace(placement.report))  # later calls do not change this one
        vars(result)["plan"], vars(result)["seeds"] = plan, request.seeds


class _Draws:
    """Where the noise of each part of a request comes from, at its beginning and again for a replay."""

    def __init__(self, request: CallRequest) -> None:
        self.request = request
        given = request.arguments.get("generator")
        self.shared = torch.default_generator if given is None else given
        self.one_for_all = isinstance(self.shared, torch.Generator) and not request.seeds
        self.start = self.shared.get_state() if self.one_for_all else None
        self.states = [] if self.one_for_all or request.seeds else _states(given)

    def rewind(self) -> None:
        """Set all generators to where they were."""
        if self.start is not None:
            self.shared.set_state(self.start)
        for generator, state in self.states:
            generator.set_state(state)

    def take(self, first: int, images: int) -> Callable[[CallRequest], tuple[CallRequest, NoiseSource]]:
        """A function that sets the noise of one part to its start, and gives the part and its source."""

        def begin(part: CallRequest) -> tuple[CallRequest, NoiseSource]:
            if part.seeds:
                generators = make_generators(part.seeds)
                if "generator" in part.accepts:
                    part = part.with_arguments(generator=generators if len(generators) > 1 else generators[0])
                return part, PerImageNoise(generators)
            if self.one_for_all:
                assert self.start is not None
                self.shared.set_state(self.start)
                if images < self.request.images:
                    return part, BatchSliceNoise(self.shared, self.request.images, first, images)
            return part, NoiseSource()

        whole = len(self.states) != self.request.images
        states = self.states if whole else self.states[first : first + images]

        def begin_again(part: CallRequest) -> tuple[CallRequest, NoiseSource]:
            for generator, state in states:
                generator.set_state(state)
            return begin(part)

        return begin_again


def _states(generators: Any) -> list[tuple[torch.Generator, torch.Tensor]]:
    return [(one, one.get_state()) for one in generators] if isinstance(generators, list) else []


def _runs_as_stock(placement: Placement, plan: Plan, source: NoiseSource) -> bool:
    """Return whether a mode around the models would change nothing, and only cost time at every call of torch."""
    return is_host(placement.device) and not plan.workarounds.value and type(source) is NoiseSource


class _CallRun:
    """One part of a request: run, looked at, and run again where it has to be."""

    def __init__(self, pipe: Any, placement: Placement, call: Call, part: CallRequest, begin: Any) -> None:
        self.pipe, self.placement, self.call, self.part, self.begin = pipe, placement, call, part, begin
        self.components = find_components(pipe)
        self.overlapped_copy = find_overlapped_copy(placement)

    def finish(self) -> Any:
        """The result, which is finite."""
        result, outputs = self._once()
        if not self.placement.plan.check_finite.value:
            return result
        broken = (
            find_non_finite(outputs)
            if self.overlapped_copy is None
            else self.overlapped_copy.read_after(outputs.wait, functools.partial(find_non_finite, outputs))
        )
        if broken:
            result = self._mend(broken)
        return result

    def _once(self) -> tuple[Any, OutputCheck]:
        part, source = self.begin(self.part)
        with (
            checking_outputs(None if self.overlapped_copy is None else self.overlapped_copy.record_event) as outputs,
            self._seams(source),
        ):
            try:
                return self.call(self.pipe, **part.arguments), outputs
            except ValueError as error:
                if is_argument_error(error):
                    hint = "change that argument; the pipeline can be called again"
                    raise UsageError(str(error), hint=hint) from error
                raise

    @contextmanager
    def _seams(self, source: NoiseSource) -> Iterator[None]:
        placement = self.placement
        plan = placement.call_plan
        set_input_adapters(self.components, plan, placement.device)
        with ExitStack() as stack:
            stack.enter_context(compile_cache_env(placement))
            on_host = plan.scheduler.value == "cpu"
            cpu_tensors = stack.enter_context(keep_on_cpu(self.components)) if on_host else None
            stack.enter_context(use_noise_source(source))
            if (
                cpu_tensors is not None
                or self.overlapped_copy is not None
                or not _runs_as_stock(placement, plan, source)
            ):
                stack.enter_context(
                    make_pipeline_function_mode(plan, placement.device, cpu_tensors, self.overlapped_copy)
                )
            stack.enter_context(preserve_function_modes())
            yield

    def _mend(self, broken: list[str]) -> Any:
        """Find where it broke, try that model once more in float32, and give up with its name if that fails too."""
        if self.placement.shared:
            raise NotFiniteError(
                f"the picture is not finite: {broken[0]} gave numbers that are not, on {self.placement.plan.device}",
                hint="others use the model now; by itself the call would be tried in float32",
            )
        with find_first_non_finite(self.components) as found:
            self._once()
        module, step = found[0] if found else (broken[0], 1)
        name = module.split(".")[0]
        component = self.components[name]
        where = f"{module} at pass {step}"
        narrow = {parameter.dtype for parameter in component.parameters()} - {torch.float32}
        if narrow and not is_quantized(component):
            is_finite = False
            self._cast(component, torch.float32, torch.float32)
            try:
                result, outputs = self._once()
                is_finite = not find_non_finite(outputs)
            finally:  # also after Ctrl-C or a lack of memory
                if not is_finite:
                    self._cast(component, next(iter(narrow)), None)
            if is_finite:
                self._report_float32(name, where)
                return result
        raise NotFiniteError(
            f"the picture is not finite: {where} is the first module whose output is not, on "
            f"{self.placement.plan.device} in {self.placement.plan.dtype.value}; in float32 it is not finite either",
            hint=f"look at the weights of {name}, or compare with a run on the cpu",
        )

    def _cast(self, component: torch.nn.Module, dtype: torch.dtype, inputs: torch.dtype | None) -> None:
        """Cast one model, and what goes into it; weights that wait elsewhere are written there anew."""
        with weights_on_cpu(self.pipe), drop_log_records(*FLOAT32_ADVICE):
            component.to(dtype)
            if inputs is None:
                keep_float32(self.pipe, self.placement.plan)
        for boundary in find_input_adapters(component):
            boundary.cast_to = inputs

    def _report_float32(self, name: str, where: str) -> None:
        report = self.placement.report
        names = (*(report.float32_models.value if report.float32_models else ()), name)
        reason = f"{name} was not finite in {self.placement.plan.dtype.value} ({where}), and is in float32"
        report.float32_models = Decision(names, reason)
