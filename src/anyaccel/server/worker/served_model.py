"""A model that is loaded, warmed up and shared by concurrent calls."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from PIL import Image

from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.embedded.model import CALL_DEFAULTS
from anyaccel.errors import DoesNotFitError, NotFiniteError, UsageError
from anyaccel.generation.call_validation import (
    check_image_call,
    find_default,
    list_parameters,
    pick_images,
    select_image_output,
)
from anyaccel.generation.guider import using_guidance_scale
from anyaccel.generation.image import expected_metadata
from anyaccel.generation.metadata import ImageMetadata
from anyaccel.generation.model_loading import LoadedModel, load_uncached
from anyaccel.generation.request import make_request
from anyaccel.planning.options import PlacementOptions
from anyaccel.progress import ProgressListener
from anyaccel.runtime.auto_pipelines import AutoPipelineForImage2Image, AutoPipelineForInpainting
from anyaccel.runtime.call.validation import find_size_multiple
from anyaccel.runtime.call_parameters import read_blocks
from anyaccel.runtime.call_request import read_call_request
from anyaccel.runtime.introspection import plain_class
from anyaccel.runtime.placement.memory_plan import find_default_side, list_call_rules, plan_call
from anyaccel.runtime.placement.oom_retry import apply_rule, clear_traceback_frames
from anyaccel.runtime.placement_state import find_placement
from anyaccel.server.batching.adapter_lock import AdapterLock
from anyaccel.server.batching.pipeline_copy import light_copy
from anyaccel.server.batching.shared_pipeline import SharedPipeline
from anyaccel.server.settings import ServedName, ServerSettings, compute_max_in_flight
from anyaccel.server.worker.denoise_progress import StepObserver, observing_steps
from anyaccel.server.worker.device_watch import DeviceWatch
from anyaccel.server.worker.job_spec import JobSpec, Task
from anyaccel.server.worker.messages import ModelFacts
from anyaccel.upstream.modular_blocks import disable_progress_bars

__all__ = ["ServedModel", "UnsafeContentError"]

_LOG = logging.getLogger(__name__)
# Expected number of images, from which the plan decides whether compiling pays off.
_EXPECTED_IMAGES = 1000
_PROMPTS = ("a red apple", "a green tree by a lake")
# Steps of a warm-up image: graph capture starts only after a few steps.
_WARM_UP_STEPS = 4


class UnsafeContentError(Exception):
    """Error raised when the model's safety checker rejects an image."""


class ServedModel:
    """A loaded model, with one pipeline for each supported task (generate, edit or inpaint)."""

    def __init__(
        self,
        served: ServedName,
        settings: ServerSettings,
        listener: ProgressListener | None = None,
        watch: DeviceWatch | None = None,
    ) -> None:
        self.name, self.settings = served.name, settings
        self.watch = watch or DeviceWatch()
        request = make_request(
            "", served.model, settings.device, 0, dtype=settings.dtype, speed=settings.speed, weights=settings.weights
        )
        options = PlacementOptions(
            dtype=request.dtype, speed=request.speed, weights=request.weights, expected_images=_EXPECTED_IMAGES
        )
        self.loaded: LoadedModel = load_uncached(request, options, listener)
        self.pipe = self.loaded.pipe
        disable_progress_bars(self.pipe)
        self.defaults: dict[str, Any] = dict(CALL_DEFAULTS) if request.model.kind == "embedded" else {}
        self._load_adapters()
        self.pipes = _find_pipelines(self.pipe)
        side = find_default_side(self.pipe)
        self.sizes = settings.sizes or ((side, side),)
        # Whether each model component batches concurrent calls.
        self.batched: dict[str, bool] = {}
        # None while only one call runs at a time.
        self.shared: SharedPipeline | None = None
        self.lock = AdapterLock(1, self._switch_adapter)
        self._warm_up()
        self._remove_failing_tasks()
        self.last_used = time.monotonic()

    def facts(self) -> ModelFacts:
        """Return the model's properties for clients and for request validation."""
        plan = self.pipe.plan
        return ModelFacts(
            name=self.name,
            pipeline=plan.pipeline,
            device=plan.device,
            virtual=plan.virtual,
            dtype=plan.dtype.value,
            weights=self.settings.weights,
            tasks=tuple(self.pipes),
            parameters={task: tuple(list_parameters(pipe)) for task, pipe in self.pipes.items()},
            multiple=find_size_multiple(self.pipe) or 1,
            sizes=self.sizes,
            fixed_sizes=self._is_static(),
            defaults={task: self._find_defaults(pipe) for task, pipe in self.pipes.items()},
            batched=self.batched,
            max_concurrent=self.max_concurrent,
            plan=str(plan),
            loras=tuple(lora.name for lora in self.settings.loras),
        )

    def _find_defaults(self, pipe: Any) -> dict[str, float | None]:
        names = ["num_inference_steps", "guidance_scale"]
        names += ["strength"] if "strength" in list_parameters(pipe) else []
        return {name: self.defaults.get(name, find_default(pipe, name)) for name in names}

    def generate(
        self, spec: JobSpec, index: int, inputs: Mapping[str, Image.Image], observer: StepObserver
    ) -> tuple[Image.Image, ImageMetadata]:
        """Generate the image at position `index` of a job; return it with its metadata.

        Raises `UnsafeContentError` if the model's safety checker rejects the image.
        """
        self.last_used = time.monotonic()
        pipe = self.pipes[spec.task]
        call = self._make_call(spec, inputs)
        check_image_call(pipe, call)
        size = spec.width, spec.height
        kwargs = {"prompt": spec.prompt, "seed": spec.seeds[index], **call}
        output = None
        if self.shared is not None:
            output = self._run_shared(pipe, kwargs, spec, observer, size)
        if output is None:
            output = self._run_exclusive(pipe, kwargs, spec, observer, size)
        if any(getattr(output, "nsfw_content_detected", None) or ()):
            raise UnsafeContentError
        image = pick_images(pipe, output)[0]
        # The metadata does not contain input images, only their argument names, as unrecorded.
        recorded = {name: value for name, value in call.items() if not isinstance(value, Image.Image)}
        expected = expected_metadata(self.loaded, spec.prompt, spec.seeds[index], recorded)
        unrecorded = (*expected.unrecorded, *(name for name in call if name not in recorded))
        values = {**vars(expected), "width": image.width, "height": image.height}
        return image, ImageMetadata(**{**values, "pipeline": plain_class(pipe).__name__, "unrecorded": unrecorded})

    @property
    def denoisers(self) -> tuple[str, ...]:
        """Names of the components that run at every denoising step, such as `unet`."""
        placement = find_placement(self.pipe)
        return () if placement is None else placement.denoisers

    def close(self) -> None:
        """Disable batching and restore the original forward method of each model component."""
        if self.shared is not None:
            self.shared.close()
            self.shared = None

    def _make_call(self, spec: JobSpec, inputs: Mapping[str, Image.Image]) -> dict[str, Any]:
        call = {**self.defaults, **spec.pipeline_kwargs()}
        parameters = list_parameters(self.pipes[spec.task])
        size = spec.width, spec.height
        for name, image in inputs.items():
            call[name] = image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)
        if "height" in parameters and "width" in parameters:
            call |= {"width": spec.width, "height": spec.height}
        return call

    def _run_shared(
        self, pipe: Any, call: dict[str, Any], spec: JobSpec, observer: StepObserver, size: tuple[int, int]
    ) -> Any:
        """Run a pipeline call concurrently with others; return None if it must be repeated exclusively.

        A call must be repeated if it runs out of memory or its output contains NaN or Inf.
        """
        with self.lock.acquire(_adapter_of(spec), is_stopped=observer.is_stopped), self.watch.using_device():
            if self.shared is None:  # an exclusive call disabled batching while this call waited
                return None
            pipe_copy = light_copy(pipe)
            try:
                with observing_steps(pipe_copy, observer, size):
                    return self.shared.run(call, pipe_copy)
            except NotFiniteError:
                reason = "the image contains NaN or Inf"
            except Exception as error:
                if not is_out_of_memory(error) and not isinstance(error, DoesNotFitError):
                    raise
                reason = "out of memory"
                # The frames of the traceback reference the call's tensors, and the exclusive run needs their memory.
                clear_traceback_frames(error)
        _LOG.warning("anyaccel: rerunning a call to %s without batching: %s", self.name, reason)
        observer.restart()
        return None

    def _run_exclusive(
        self, pipe: Any, call: dict[str, Any], spec: JobSpec, observer: StepObserver, size: tuple[int, int]
    ) -> Any:
        """Run a pipeline call while no other call is running.

        Unlike a shared call, an exclusive call may offload weights or recompute the image in float32.
        """
        lock = self.lock.acquire(_adapter_of(spec), exclusive=True, is_stopped=observer.is_stopped)
        with lock, self.watch.using_device():
            was_shared = self.shared is not None
            self.close()
            try:
                with observing_steps(pipe, observer, size), using_guidance_scale(pipe, call) as arguments:
                    return pipe(**arguments, **select_image_output(pipe))
            finally:
                if was_shared:
                    self._resume_sharing(pipe)

    def _resume_sharing(self, pipe: Any) -> None:
        """Move offloaded weights back to the device and re-enable batching.

        If this fails, later calls run one at a time.
        """
        placement = find_placement(pipe)
        try:
            if placement is not None and placement.residence != "resident":
                apply_rule(pipe, placement, placement.weights_rule)
            self._warm_up()
        except Exception as error:  # noqa: BLE001 - the model still works, one call at a time
            _LOG.warning("anyaccel: calls to %s are no longer batched: %r", self.name, error)
            self.close()
            self._set_concurrency(1)

    def _warm_up(self) -> None:
        """Generate one image per configured size, and determine which components can batch calls."""
        for width, height in self.sizes:
            call = self._warm_up_call(_PROMPTS[0], width, height, _WARM_UP_STEPS)
            with using_guidance_scale(self.pipe, call) as arguments:
                self.pipe(**arguments, seed=0)
        self._set_concurrency(1)
        placement = find_placement(self.pipe)
        assert placement is not None
        if placement.residence != "resident" or placement.plan.step_skipping.value is not None:
            return  # offloading and step skipping hold the state of a single call
        if read_blocks(self.pipe) is not None:
            return  # the guider of a modular pipeline also holds the state of a call
        max_calls = self._find_max_calls()
        if max_calls == 1:
            return
        shared = SharedPipeline(self.pipe, max_calls=max_calls)
        self.batched = dict.fromkeys(shared.forwards, True)
        for width, height in self.sizes:
            calls = [
                {**self._warm_up_call(prompt, width, height, 2), "seed": seed} for seed, prompt in enumerate(_PROMPTS)
            ]
            matches = shared.warm_up(*calls)
            # A component is batched only if its results match at every size: kernels depend on the shape.
            self.batched = {name: batched and matches[name] for name, batched in self.batched.items()}
            if self._is_static():
                shared.prepare_batch_sizes(max_calls)
        shared.enable(self.batched)
        if not any(self.batched.get(name) for name in placement.denoisers):
            shared.close()
            return
        self.shared = shared
        self._set_concurrency(max_calls)

    def _set_concurrency(self, max_concurrent: int) -> None:
        """Set the maximum number of images per batch, and adjust how many calls may run at the same time."""
        self.max_concurrent, self.lock.max_holders = max_concurrent, compute_max_in_flight(max_concurrent)

    def _remove_failing_tasks(self) -> None:
        """Run each pipeline that `AutoPipeline` created from the main one, and remove the tasks that fail.

        `AutoPipeline` chooses a pipeline class by model family, but that class may not support every model
        in the family.
        """
        width, height = self.sizes[0]
        for task, pipe in list(self.pipes.items()):
            if pipe is self.pipe:
                continue
            inputs = {"image": Image.new("RGB", (width, height), "grey")}
            if task == "inpaint":
                inputs["mask_image"] = Image.new("L", (width, height), "white")
            spec = JobSpec(
                task=task, model=self.name, prompt=_PROMPTS[0], seeds=(0,), width=width, height=height,
                num_inference_steps=2,
            )  # fmt: skip
            if "strength" in list_parameters(pipe):  # with the default of SDXL, 0.3, no step would run
                spec = replace(spec, strength=1.0)
            try:
                self.generate(spec, 0, inputs, StepObserver(lambda done, total: None))
            except (ValueError, TypeError, AttributeError, RuntimeError) as error:
                _LOG.info("anyaccel: %s does not support the task %s: %s", self.name, task, error)
                del self.pipes[task]

    def _is_static(self) -> bool:
        """Return whether each image size is compiled separately, so that a new size would block all requests."""
        plan = self.pipe.plan
        return bool(plan.report.compiled_models or plan.compiler.value.static)

    def _find_max_calls(self) -> int:
        """Return how many images of the largest configured size fit into memory together, up to `max_batch`."""
        placement = find_placement(self.pipe)
        assert placement is not None
        if placement.plan.images_per_call.value == 1:
            return 1
        width, height = max(self.sizes, key=lambda size: size[0] * size[1])
        call = self._warm_up_call(_PROMPTS[0], width, height, _WARM_UP_STEPS)
        images = self.settings.max_batch
        while images > 1:
            prompts = {**call, "prompt": [_PROMPTS[0]] * images}
            request = read_call_request(self.pipe, plain_class(self.pipe).__call__, (), prompts)
            try:
                rule = plan_call(
                    self.pipe, placement, request, list_call_rules(self.pipe, placement, images)
                ).decision.value
            except DoesNotFitError:
                rule = None
            if rule and rule.residence == "resident" and rule.images_per_call in (None, images):
                return images
            images //= 2
        return 1

    def _warm_up_call(self, prompt: str, width: int, height: int, steps: int) -> dict[str, Any]:
        parameters = list_parameters(self.pipe)
        values = {**self.defaults, "num_inference_steps": steps, "width": width, "height": height}
        call = {"prompt": prompt, **{name: value for name, value in values.items() if name in parameters}}
        if "generate" not in self.pipes and "image" in parameters:
            call["image"] = Image.new("RGB", (width, height), "grey")
        if "generate" not in self.pipes and "mask_image" in parameters:
            call["mask_image"] = Image.new("L", (width, height), "white")
        return call

    def _load_adapters(self) -> None:
        if not self.settings.loras:
            return
        if not hasattr(self.pipe, "load_lora_weights"):
            raise UsageError(f"{type(self.pipe).__name__} does not support LoRA", hint="omit --lora")
        for lora in self.settings.loras:
            self.pipe.load_lora_weights(lora.model, adapter_name=lora.name)
        # Adapters stay loaded but disabled: `_switch_adapter` enables one per group of calls.
        self.pipe.disable_lora()

    def _switch_adapter(self, adapter: str | None) -> None:
        """Enable one LoRA adapter, or disable all adapters if `adapter` is None.

        Must not be called while a pipeline call is running.
        """
        if adapter is None:
            self.pipe.disable_lora()
        else:
            name, _, scale = adapter.rpartition("@")
            self.pipe.enable_lora()
            self.pipe.set_adapters([name], adapter_weights=[float(scale)])
        if self.shared is not None:
            self.shared.drop_stale_captures()


def _adapter_of(spec: JobSpec) -> str | None:
    # Includes the scale, because calls with different scales cannot share a batch either.
    return None if spec.lora is None else f"{spec.lora}@{spec.lora_scale}"


def _find_pipelines(pipe: Any) -> dict[Task, Any]:
    """Return a pipeline for each supported task; all pipelines share the models of `pipe`."""
    parameters = inspect.signature(plain_class(pipe).__call__).parameters
    if read_blocks(pipe) is not None:
        check_image_call(pipe, {})
        return {"generate": pipe}
    if "prompt" not in parameters:
        raise UsageError(f"{type(pipe).__name__} does not accept a prompt", hint="serve a text-to-image model")
    pipes: dict[Task, Any] = {}
    # An optional `image` without `strength` is a reference image: the pipeline also works with only a prompt.
    image_is_optional = "image" in parameters and parameters["image"].default is not inspect.Parameter.empty
    if "image" not in parameters or ("strength" not in parameters and image_is_optional):
        pipes["generate"] = pipe
    if "image" in parameters:
        pipes["inpaint" if "mask_image" in parameters else "edit"] = pipe
    others: tuple[tuple[Task, Any], ...] = (
        ("edit", AutoPipelineForImage2Image),
        ("inpaint", AutoPipelineForInpainting),
    )
    for task, auto_class in others:
        if task in pipes:
            continue
        try:
            pipes[task] = auto_class.from_pipe(pipe)
        except (ValueError, AttributeError, KeyError) as error:  # diffusers has no such pipeline for these models
            _LOG.debug("anyaccel: no %s pipeline for %s: %s", task, type(pipe).__name__, error)
            continue
        pipes[task].set_progress_bar_config(disable=True)
    return pipes
