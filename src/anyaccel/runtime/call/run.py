"""Execution of one pipeline call: validation, memory settings, workarounds and the NaN check."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from anyaccel.backends.device_type_checks import is_host
from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.errors import AnyaccelError, DoesNotFitError, NotFiniteError, UsageError
from anyaccel.library_logging import FLOAT32_ADVICE, drop_log_records
from anyaccel.planning.decision import Decision
from anyaccel.planning.plan import Plan
from anyaccel.runtime.call.request_noise import RequestNoise
from anyaccel.runtime.call.single_images import join_results, repeat_input_images, select_image
from anyaccel.runtime.call.validation import validate_call, warn_unused_arguments
from anyaccel.runtime.call_request import CallRequest, read_call_request
from anyaccel.runtime.distributed.parallel import run_split, share_noise
from anyaccel.runtime.introspection import find_components
from anyaccel.runtime.keyword_use import reads_keyword
from anyaccel.runtime.library_code import find_user_code_in_call
from anyaccel.runtime.placement.float32_weights import read_float32_weights, restore_float32_weights
from anyaccel.runtime.placement.inherit import follow_models
from anyaccel.runtime.placement.new_models import place_new_models
from anyaccel.runtime.placement.oom_retry import run_within_memory, weights_on_cpu
from anyaccel.runtime.placement.place import place_in_smaller_dtype
from anyaccel.runtime.placement.quantized_layers import check_no_merged_adapters
from anyaccel.runtime.placement.row_split import split_rows
from anyaccel.runtime.placement_state import Placement, find_placement
from anyaccel.runtime.speed.apply_speedups import apply_speedups
from anyaccel.runtime.speed.compile import compile_cache_env, record_shape
from anyaccel.runtime.speed.quantize import is_quantized
from anyaccel.runtime.workarounds.cpu_generators import use_cpu_generators
from anyaccel.runtime.workarounds.flex_attention import use_dense_masks
from anyaccel.runtime.workarounds.function_modes import make_pipeline_function_mode, preserve_function_modes
from anyaccel.runtime.workarounds.model_inputs import find_input_adapters, set_input_adapters
from anyaccel.runtime.workarounds.nan_check import (
    OutputCheck,
    checking_outputs,
    find_first_non_finite,
    find_non_finite,
    warn_safety_checker,
)
from anyaccel.runtime.workarounds.noise import NoiseSource, use_noise_source
from anyaccel.runtime.workarounds.scheduler_tensors_on_cpu import keep_on_cpu
from anyaccel.runtime.workarounds.side_stream_copy import find_side_stream_copy
from anyaccel.upstream.diffusers_internals import is_argument_error
from anyaccel.upstream.torch_internals import read_hook_tables

__all__ = ["run_call"]

_LOG = logging.getLogger("anyaccel")

Call = Callable[..., Any]


def run_call(pipe: Any, placement: Placement, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one call to a placed pipeline with the plan's workarounds, and return the pipeline's output.

    Calls from other threads wait, because a pipeline has only one scheduler.
    """
    while True:
        with placement.lock:  # one call at a time, because a pipeline has one scheduler
            current = find_placement(pipe) or placement
            if current is placement:
                if placement.running:  # a nested pipeline, or a callback that calls the pipeline again
                    return call(pipe, *args, **_remove_seed(call, kwargs))
                current = follow_models(pipe, placement)
            if current is placement:
                warn_unused_arguments(pipe, kwargs)
                return _run_request(pipe, placement, call, args, kwargs)
        placement = current  # the pipeline was placed again while this thread waited for the lock


def _remove_seed(call: Call, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call inside another call of the same pipeline; raise if they have a seed."""
    if "seed" not in kwargs or reads_keyword(call, "seed"):
        return kwargs
    seed = kwargs.get("seed")
    if seed is not None:
        raise UsageError(
            "seed cannot be used while the same pipeline is running",
            hint=f"pass generator=torch.Generator().manual_seed({seed}) instead",
        )
    return {name: value for name, value in kwargs.items() if name != "seed"}


def _run_request(pipe: Any, placement: Placement, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    request = read_call_request(pipe, call, args, kwargs)
    validate_call(pipe, placement, request)
    place_new_models(pipe, placement)
    check_no_merged_adapters(pipe, placement)
    split = placement.plan.parallel.value
    if split is not None:
        # Before the generator states are stored: all ranks must replay from the states of rank 0.
        request = share_noise(request)
    noise = RequestNoise(request)

    def run_once(part: CallRequest, images_per_call: int | None) -> Any:
        record_shape(placement, part)
        placement.running = True
        try:
            with apply_speedups(pipe, placement, part), _split_batch(pipe, placement, part, images_per_call):
                return run_split(pipe, split, _CallRun(pipe, placement, call, part, noise).finish)
        finally:
            _set_idle(pipe, placement)

    def run(images_per_call: int | None) -> Any:
        return _run_images(placement, request, functools.partial(run_once, images_per_call=images_per_call))

    try:
        result = run(None) if placement.shared else run_within_memory(pipe, placement, request, run)
    except DoesNotFitError as error:
        if placement.shared or split is not None or not place_in_smaller_dtype(pipe, placement, error):
            raise
        noise.rewind()
        smaller = find_placement(pipe)
        assert smaller is not None
        return _run_request(pipe, smaller, call, args, kwargs)
    finally:
        _set_idle(pipe, placement)
    _warn_tiling(placement)
    if placement.plan.check_finite.value:
        warn_safety_checker(result)
    _attach_plan(result, placement, request)
    return result


@contextmanager
def _split_batch(pipe: Any, placement: Placement, request: CallRequest, images_per_call: int | None) -> Iterator[None]:
    """Run the models for at most `images_per_call` images at a time inside the `with` block, if they support it."""

    def report(reason: str) -> None:
        if reason not in placement.unsplit:
            placement.unsplit.add(reason)
            _LOG.warning(
                "anyaccel: a model runs %d images at a time instead of %s, because its batch cannot be split: %s",
                request.images,
                images_per_call,
                reason,
            )

    with split_rows(find_components(pipe), placement.denoisers, request.images, images_per_call, report):
        yield


# diffusers cuts off the padding of a prompt only in a batch of one (`mask_text_embeddings` in diffusers 0.42).
_EMBEDS_BY_BATCH = ("LattePipeline",)


def _run_images(placement: Placement, request: CallRequest, run: Callable[[CallRequest], Any]) -> Any:
    """Run images with seeds together if each of them gets only noise of its own seed, otherwise one by one."""
    if len(request.seeds) < 2:
        return run(request)
    if not placement.seeds_run_singly and request.pipeline not in _EMBEDS_BY_BATCH:
        together = repeat_input_images(request)
        try:
            return run(together)
        except Exception as error:
            # If an input image was repeated for each image, the pipeline may have rejected the list.
            if (together is request and not _depends_on_batch(error)) or is_out_of_memory(error):
                raise
    results = [run(select_image(request, image)) for image in range(request.images)]
    placement.seeds_run_singly = True
    return join_results(results)


def _depends_on_batch(error: Exception) -> bool:
    """Return whether a call for several images with seeds may succeed with one image per call.

    Pipelines that sample tokens accept only one generator, such as aMUSEd; pipelines that ignore the number
    of videos per prompt, such as CogVideoX, reject a list with one generator per video (diffusers 0.42).
    Any other error occurs again with one image.
    """
    # An error of anyaccel is for example an invalid argument.
    return not isinstance(error, AnyaccelError) or "list of generators" in str(error)


def _set_idle(pipe: Any, placement: Placement) -> None:
    """Record that no call is running, even if a callback placed the pipeline again during the call."""
    current = find_placement(pipe)  # another object if a callback placed the pipeline again
    placement.running = False
    if current is not None and current is not placement:
        current.running = False


def _warn_tiling(placement: Placement) -> None:
    """Warn once if memory is too small to decode images as a whole: tiling changes them, also with `speed="exact"`."""
    if not placement.vae_in_parts or placement.options.vae_tiling is not None or placement.tiling_was_reported:
        return
    placement.tiling_was_reported = True
    _LOG.warning(
        "anyaccel: the VAE processes large images in tiles, which changes them slightly, because the memory of %s is "
        "too small (%s); pass vae_tiling=True to accept this or vae_tiling=False to prevent it, or reduce the size",
        placement.plan.device,
        placement.memory_rule.reason,
    )


def _attach_plan(result: Any, placement: Placement, request: CallRequest) -> None:
    """Add `plan` and `seeds` to an output object that can have new attributes; leave its own fields unchanged."""
    if hasattr(result, "to_tuple") and hasattr(result, "__dict__"):
        plan = replace(placement.plan, report=replace(placement.report))  # later calls change the pipeline's report
        own = {field.name for field in fields(result)} if is_dataclass(result) else set(vars(result))
        vars(result).update({k: v for k, v in {"plan": plan, "seeds": request.seeds}.items() if k not in own})


def _needs_no_function_mode(placement: Placement, plan: Plan, source: NoiseSource) -> bool:
    """Return whether a call can run without a torch function mode, which slows down every torch call.

    No mode is required on the CPU if there are no workarounds and the noise source is the default one.
    """
    return is_host(placement.device) and not plan.workarounds.value and type(source) is NoiseSource


class _CallRun:
    """One pipeline call, rerun with the failing model in float32 if its outputs contain NaN or Inf."""

    def __init__(self, pipe: Any, placement: Placement, call: Call, request: CallRequest, noise: RequestNoise) -> None:
        self.pipe, self.placement, self.call, self.request, self.noise = pipe, placement, call, request, noise
        self.components = find_components(pipe)
        self.side_stream_copy = find_side_stream_copy(placement)

    def finish(self) -> Any:
        """Run the call and return its output; raise `NotFiniteError` if a float32 rerun also fails."""
        result, outputs = self._run_once()
        if not self.placement.plan.check_finite.value:
            return result
        non_finite = (
            find_non_finite(outputs)
            if self.side_stream_copy is None
            else self.side_stream_copy.read_after(outputs.wait, functools.partial(find_non_finite, outputs))
        )
        if non_finite and not (outputs.last_model not in non_finite and self._may_be_repaired(non_finite)):
            result = self._recover(non_finite)
        return result

    def _may_be_repaired(self, names: list[str]) -> bool:
        """Return whether code of the user can have replaced NaN and Inf in the models' outputs."""
        arguments = self.request.arguments
        if any("callback" in name and value is not None for name, value in arguments.items()):
            return True
        if any(read_hook_tables(self.components[name])[0] for name in names if name in self.components):
            return True
        return bool(find_user_code_in_call(self.pipe, arguments))

    def _run_once(self) -> tuple[Any, OutputCheck]:
        request, source = self.noise.start(self.request)
        with (
            checking_outputs(None if self.side_stream_copy is None else self.side_stream_copy.record_event) as outputs,
            self._apply_plan(source),
        ):
            try:
                result = request.call(self.call, self.pipe)
                source.check_finished()
                return result, outputs
            except ValueError as error:
                if is_argument_error(error):
                    hint = "correct the argument and call the pipeline again"
                    raise UsageError(str(error), hint=hint) from error
                raise

    @contextmanager
    def _apply_plan(self, source: NoiseSource) -> Iterator[None]:
        """Use the noise source and apply the plan's workarounds inside the `with` block."""
        placement = self.placement
        plan = placement.call_plan
        set_input_adapters(self.components, plan, placement.device)
        with ExitStack() as stack:
            stack.enter_context(compile_cache_env(placement))
            on_cpu = plan.scheduler.value == "cpu"
            cpu_tensors = stack.enter_context(keep_on_cpu(self.components)) if on_cpu else None
            stack.enter_context(use_noise_source(source))
            if not is_host(placement.device):
                stack.enter_context(use_dense_masks(placement.device))
                stack.enter_context(use_cpu_generators(placement.device))
            if (
                cpu_tensors is not None
                or self.side_stream_copy is not None
                or not _needs_no_function_mode(placement, plan, source)
            ):
                # `send` does not wait for the device: UniPC's coefficients are copied in every step.
                copy = placement.opened.driver.send
                stack.enter_context(
                    make_pipeline_function_mode(plan, placement.device, cpu_tensors, self.side_stream_copy, copy)
                )
            # Last, and so left first: an interrupted call may leave modes on the stack.
            stack.enter_context(preserve_function_modes())
            yield

    def _recover(self, non_finite: list[str]) -> Any:
        """Rerun the call with the failing model in float32; raise `NotFiniteError` if that also fails.

        The error names the first module that produced NaN or Inf.
        """
        if self.placement.shared:
            raise NotFiniteError(
                f"the image contains NaN or Inf values, which {non_finite[0]} produced on {self.placement.plan.device}",
                hint="run one call at a time; a call is retried in float32 only if no other call uses the model",
            )
        with find_first_non_finite(self.components) as failures:
            self._run_once()
        module, step = failures[0] if failures else (non_finite[0], 1)
        name = module.split(".")[0]
        component = self.components[name]
        where = f"{module} at forward pass {step}"
        low_precision = {parameter.dtype for parameter in component.parameters()} - {torch.float32}
        retries = low_precision and not is_quantized(component)
        if retries:
            is_finite = False
            self._cast(component, torch.float32, torch.float32)
            try:
                result, outputs = self._run_once()
                is_finite = not find_non_finite(outputs)
            finally:  # also after KeyboardInterrupt or an out-of-memory error
                if not is_finite:
                    self._cast(component, next(iter(low_precision)), None)
            if is_finite:
                self._report_float32(name, where)
                return result
        raise NotFiniteError(
            f"the image contains NaN or Inf values{', even when recomputed in float32' if retries else ''}; "
            f"the first ones occur in {where}, on {self.placement.plan.device} in {self.placement.plan.dtype.value}",
            hint=f"check the weights of {name} for NaN and Inf"
            + ("" if is_host(self.placement.device) else ", or run the same call on the CPU to compare"),
        )

    def _cast(self, component: torch.nn.Module, dtype: torch.dtype, inputs: torch.dtype | None) -> None:
        """Cast a model to `dtype`, and let its input adapters cast floating-point inputs to `inputs`.

        Offloaded weights are moved to the CPU, cast there and offloaded again.
        """
        with weights_on_cpu(self.pipe), drop_log_records(*FLOAT32_ADVICE):
            kept = read_float32_weights(self.pipe, self.placement.plan)
            component.to(dtype)
            if inputs is None:
                restore_float32_weights(self.pipe, self.placement.plan, kept)
        for adapter in find_input_adapters(component):
            adapter.cast_to = inputs

    def _report_float32(self, name: str, where: str) -> None:
        report = self.placement.report
        names = (*(report.float32_models.value if report.float32_models else ()), name)
        reason = f"{name} produced NaN or Inf in {self.placement.plan.dtype.value} ({where}), but not in float32"
        report.float32_models = Decision(names, reason)
