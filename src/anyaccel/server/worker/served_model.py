"""A model that is loaded, warmed up and shared by concurrent calls."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from PIL import Image

from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.embedded.model import CALL_DEFAULTS
from anyaccel.embedded.motion import FRAMES, MIN_FRAMES
from anyaccel.errors import AnyaccelError, DoesNotFitError, NotFiniteError
from anyaccel.generation.call_validation import check_size, find_default, list_parameters, map_call
from anyaccel.generation.guider import using_guidance_scale
from anyaccel.generation.inputs import InputMedia
from anyaccel.generation.media import describe_result, expected_metadata, group_ip_images
from anyaccel.generation.metadata import MediaMetadata
from anyaccel.generation.model_loading import LoadedModel, load_uncached
from anyaccel.generation.outputs import collect_media, select_outputs
from anyaccel.generation.pipeline_interface import PipelineInterface, read_interface
from anyaccel.generation.request import make_request
from anyaccel.media.formats import check_format, default_suffix
from anyaccel.media.types import Kind, Media
from anyaccel.planning.options import PlacementOptions
from anyaccel.progress import ProgressListener
from anyaccel.runtime.call_parameters import read_blocks
from anyaccel.runtime.call_request import read_call_request
from anyaccel.runtime.durations import find_frame_parameter
from anyaccel.runtime.introspection import plain_class
from anyaccel.runtime.placement.memory_plan import list_call_rules, plan_call
from anyaccel.runtime.placement.oom_retry import apply_rule, clear_traceback_frames
from anyaccel.runtime.placement_state import find_placement
from anyaccel.server.batching.adapter_lock import AdapterLock
from anyaccel.server.batching.pipeline_copy import light_copy
from anyaccel.server.batching.shared_pipeline import SharedPipeline
from anyaccel.server.settings import ServedName, ServerSettings, compute_max_in_flight
from anyaccel.server.worker.adapters import LoraAdapters
from anyaccel.server.worker.denoise_progress import StepObserver, observing_steps
from anyaccel.server.worker.device_watch import DeviceWatch
from anyaccel.server.worker.job_inputs import fit_inputs
from anyaccel.server.worker.job_spec import JobSpec, Task
from anyaccel.server.worker.messages import ModelFacts, VideoFacts
from anyaccel.server.worker.result_files import check_result_format
from anyaccel.server.worker.served_tasks import (
    find_default_size,
    find_multiple,
    find_pipelines,
    list_inputs,
    list_required,
    read_audio_facts,
    read_video_facts,
    takes_many_images,
)
from anyaccel.server.worker.settable_arguments import find_settable_arguments
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
    """A loaded model, with one pipeline for each supported task (generate, edit or inpaint).

    It generates images, videos or audio. Only the calls of image models are batched.
    """

    def __init__(
        self,
        served: ServedName,
        settings: ServerSettings,
        listener: ProgressListener | None = None,
        watch: DeviceWatch | None = None,
        speed: str | None = None,
    ) -> None:
        self.name, self.settings = served.name, settings
        self.watch = watch or DeviceWatch()
        request = make_request(
            "", served.model, settings.device, 0, dtype=settings.dtype, speed=speed or settings.speeds[0],
            weights=settings.weights, controlnet=settings.controlnets or None, ip_adapter=settings.ip_adapters or None,
        )  # fmt: skip
        options = PlacementOptions(
            dtype=request.dtype, speed=request.speed, weights=request.weights, expected_images=_EXPECTED_IMAGES
        )
        self.loaded: LoadedModel = load_uncached(request, options, listener)
        self.pipe = self.loaded.pipe
        disable_progress_bars(self.pipe)
        self.defaults: dict[str, Any] = dict(CALL_DEFAULTS) if request.model.kind == "embedded" else {}
        self.adapters = LoraAdapters(self.pipe, settings)
        self.pipes = find_pipelines(self.loaded)
        # The one that the warm-up runs; a pipeline with a ControlNet is not the loaded one.
        self.main_task = next(iter(self.pipes))
        self.interface = read_interface(self.pipes[self.main_task])
        self.kind: Kind = self.interface.kind or "image"
        # A missing library is reported at startup, not after the first video was generated.
        check_format(default_suffix(self.kind), self.kind, with_audio=self.interface.with_audio)
        self.sizes = settings.sizes or (find_default_size(self.pipes[self.main_task]),)
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
            multiple=find_multiple(self.pipe),
            sizes=self.sizes,
            fixed_sizes=self._is_static(),
            defaults={task: self._find_defaults(pipe) for task, pipe in self.pipes.items()},
            batched=self.batched,
            max_concurrent=self.max_concurrent,
            plan=str(plan),
            loras=self.adapters.names,
            kind=self.kind,
            inputs={task: self._list_inputs(task) for task in self.pipes},
            required_inputs={task: list_required(self._list_inputs(task)) for task in self.pipes},
            many_images=takes_many_images(self.pipes["edit"]) if "edit" in self.pipes else False,
            arguments={
                task: find_settable_arguments(read_interface(pipe).parameters) for task, pipe in self.pipes.items()
            },
            video=self._read_video_facts(self.interface) if self.kind == "video" else None,
            audio=read_audio_facts(self.interface) if self.kind == "audio" else None,
            speeds=self.settings.speeds,
        )

    def _read_video_facts(self, interface: PipelineInterface) -> VideoFacts:
        facts = read_video_facts(interface)
        return replace(facts, frame_limits=(MIN_FRAMES, FRAMES)) if self.loaded.model.with_motion else facts

    def _list_inputs(self, task: Task) -> tuple[str, ...]:
        with_ip_adapter = bool(self.settings.ip_adapters)
        return list_inputs(self.pipes[task], task, with_ip_adapter=with_ip_adapter)

    def _find_defaults(self, pipe: Any) -> dict[str, float | None]:
        names = ["num_inference_steps", "guidance_scale"]
        names += ["strength"] if "strength" in list_parameters(pipe) else []
        return {name: self.defaults.get(name, find_default(pipe, name)) for name in names}

    def generate(
        self, spec: JobSpec, index: int, inputs: Mapping[str, list[Image.Image]], observer: StepObserver
    ) -> tuple[Media, MediaMetadata]:
        """Generate the result at position `index` of a job; return it with its metadata.

        Raises `UnsafeContentError` if the model's safety checker rejects the image.
        """
        self.last_used = time.monotonic()
        pipe = self.pipes[spec.task]
        interface = read_interface(pipe)
        check_result_format(spec, with_audio=interface.with_audio)
        call = self._make_call(spec, inputs)
        mapped = map_call(interface, call, prompt=True)
        mapped |= group_ip_images(mapped, len(self.loaded.additions.ip_adapters))
        check_size(pipe, mapped)
        kwargs = {"prompt": spec.prompt, "seed": spec.seeds[index], **mapped, **select_outputs(interface)}
        size = spec.width, spec.height
        output = None
        if self.shared is not None:
            output = self._run_shared(pipe, kwargs, spec, observer, size)
        if output is None:
            output = self._run_exclusive(pipe, kwargs, spec, observer, size)
        if any(getattr(output, "nsfw_content_detected", None) or ()):
            raise UnsafeContentError
        media = collect_media(interface, output, spec.fps or 0.0)[0]
        # The metadata does not contain input images, only their argument names, as unrecorded.
        expected = describe_result(expected_metadata(self.loaded, spec.prompt, spec.seeds[index], call), media)
        return media, replace(expected, pipeline=plain_class(pipe).__name__)

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

    def _make_call(self, spec: JobSpec, inputs: Mapping[str, list[Image.Image]]) -> dict[str, Any]:
        pipe, size = self.pipes[spec.task], (spec.width, spec.height)
        parameters = list_parameters(pipe)
        call = {**self.defaults, **spec.pipeline_kwargs()}
        call |= fit_inputs(inputs, self.kind, size, many_images=takes_many_images(pipe))
        if "height" in parameters and "width" in parameters:
            call |= {"width": spec.width, "height": spec.height}
        if self.kind == "video":
            call |= {"fps": spec.fps}
            call |= {"frames": spec.num_frames} if find_frame_parameter(parameters) else {}
        if self.kind == "audio" and spec.seconds is not None:
            call["seconds"] = spec.seconds
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
                    return pipe(**arguments)
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
        """Generate one result per configured size, and determine which components can batch calls."""
        pipe = self.pipes[self.main_task]
        for width, height in self.sizes:
            call = self._warm_up_call(_PROMPTS[0], width, height, _WARM_UP_STEPS)
            with using_guidance_scale(pipe, call) as arguments:
                pipe(**arguments, seed=0)
        self._set_concurrency(1)
        placement = find_placement(self.pipe)
        assert placement is not None
        if self.kind != "image" or pipe is not self.pipe:
            return  # a single video keeps the device busy; the batches of a ControlNet are not tested
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
            if pipe is self.pipes[self.main_task]:
                continue
            inputs = {
                name: [Image.new("L" if name == "mask_image" else "RGB", (width, height), "white")]
                for name in self._list_inputs(task)
            }
            spec = JobSpec(
                task=task, model=self.name, prompt=_PROMPTS[0], seeds=(0,), width=width, height=height,
                num_inference_steps=2, kind=self.kind, output_format="png",
            )  # fmt: skip
            if self.kind == "video":
                facts = self._read_video_facts(self.interface)
                frames = facts.shortest if facts.sets_frames else None
                spec = replace(spec, num_frames=frames, fps=facts.fps, output_format="gif")
            if "strength" in list_parameters(pipe):  # with the default of SDXL, 0.3, no step would run
                spec = replace(spec, strength=1.0)
            try:
                self.generate(spec, 0, inputs, StepObserver(lambda done, total: None))
            except (ValueError, TypeError, AttributeError, RuntimeError, AnyaccelError) as error:
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
        pipe = self.pipes[self.main_task]
        interface = read_interface(pipe)
        parameters = interface.arguments
        values = {**self.defaults, "num_inference_steps": steps, "width": width, "height": height}
        call = {name: value for name, value in values.items() if name in parameters}
        if self.kind == "video" and not self.pipe.plan.compiler.value.static:
            facts = self._read_video_facts(interface)
            call |= {"frames": facts.shortest} if facts.sets_frames else {}  # a short video is enough
        for name in self._list_inputs(self.main_task):
            image = Image.new("L" if name == "mask_image" else "RGB", (width, height), "grey")
            call[name] = InputMedia(kind="image", media=image)
        return {"prompt": prompt, **map_call(interface, call, prompt=True), **select_outputs(interface)}

    def _switch_adapter(self, adapter: str | None) -> None:
        """Enable one LoRA adapter, or disable all adapters if `adapter` is None.

        Must not be called while a pipeline call is running.
        """
        if adapter is None:
            self.adapters.disable()
        else:
            name, _, scale = adapter.rpartition("@")
            self.adapters.enable(name, float(scale))
        if self.shared is not None:
            self.shared.drop_stale_captures()


def _adapter_of(spec: JobSpec) -> str | None:
    # Includes the scale, because calls with different scales cannot share a batch either.
    return None if spec.lora is None else f"{spec.lora}@{spec.lora_scale}"
