"""A model as the worker serves it: loaded, warm, and shared by as many calls as can be joined."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Mapping
from typing import Any

from PIL import Image

from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.embedded.model import CALL_DEFAULTS
from anyaccel.errors import DoesNotFitError, NotFiniteError, UsageError
from anyaccel.generation.call_validation import check_image_call, find_default, pick_images
from anyaccel.generation.image import expected_metadata
from anyaccel.generation.metadata import ImageMetadata
from anyaccel.generation.model_cache import LoadedModel, load_uncached
from anyaccel.generation.request import make_request
from anyaccel.planning.options import PlacementOptions
from anyaccel.progress import ProgressListener
from anyaccel.runtime.call.validation import find_multiple
from anyaccel.runtime.call_request import read_call_request
from anyaccel.runtime.pipeline import AutoPipelineForImage2Image, AutoPipelineForInpainting, plain_class
from anyaccel.runtime.placement.memory_plan import find_default_side, list_call_rules, plan_call
from anyaccel.runtime.placement.oom_retry import apply_rule, clear_traceback_frames
from anyaccel.runtime.placement_state import find_placement
from anyaccel.server.batching.model_lock import AdapterLock
from anyaccel.server.batching.shared_pipeline import SharedPipeline, light_copy
from anyaccel.server.settings import ServedName, ServerSettings, count_in_hand
from anyaccel.server.worker.denoise_progress import Watcher, watching_steps
from anyaccel.server.worker.job_spec import JobSpec, Task
from anyaccel.server.worker.messages import ModelFacts

__all__ = ["RefusedError", "ServedModel"]

_LOG = logging.getLogger(__name__)
_TO_COME = 1000
"""Pictures that a service expects, when what is done ahead is weighed."""
_PROMPTS = ("a red apple", "a green tree by a lake")
_STEPS = 4
"""Of a picture that is made to warm up: enough for what is done from the fourth step on."""


class RefusedError(Exception):
    """The model's own safety checker refused the picture."""


class ServedModel:
    """One model on the device, its pipelines by task, and who uses it."""

    def __init__(self, served: ServedName, settings: ServerSettings, listener: ProgressListener | None = None) -> None:
        self.name, self.settings = served.name, settings
        order = make_request("", served.model, settings.device, 0, dtype=settings.dtype, speed=settings.speed)
        options = PlacementOptions(dtype=order.dtype, speed=order.speed, expected_images=_TO_COME)
        self.loaded: LoadedModel = load_uncached(order, options, listener)
        self.pipe = self.loaded.pipe
        self.pipe.set_progress_bar_config(disable=True)
        self.defaults: dict[str, Any] = dict(CALL_DEFAULTS) if order.model.kind == "embedded" else {}
        self._load_adapters()
        self.pipes = _find_pipelines(self.pipe)
        side = find_default_side(self.pipe)
        self.sizes = settings.sizes or ((side, side),)
        self.joins: dict[str, bool] = {}
        self.shared: SharedPipeline | None = None
        self.turnstile = AdapterLock(1, self._switch)
        self._warm_up()
        self._try_tasks()
        self.last_used = time.monotonic()

    def facts(self) -> ModelFacts:
        """What a client must know."""
        plan = self.pipe.plan
        return ModelFacts(
            name=self.name,
            pipeline=plan.pipeline,
            device=plan.device,
            virtual=plan.virtual,
            dtype=plan.dtype.value,
            tasks=tuple(self.pipes),
            takes={task: tuple(_parameters(pipe)) for task, pipe in self.pipes.items()},
            multiple=find_multiple(self.pipe) or 1,
            sizes=self.sizes,
            fixed_sizes=self._is_static(),
            steps=self.defaults.get("num_inference_steps", find_default(self.pipe, "num_inference_steps")),
            guidance=self.defaults.get("guidance_scale", find_default(self.pipe, "guidance_scale")),
            joins=self.joins,
            at_once=self.at_once,
            plan=str(plan),
            loras=tuple(one.name for one in self.settings.loras),
        )

    def make(
        self, work: JobSpec, picture: int, inputs: Mapping[str, Image.Image], watcher: Watcher
    ) -> tuple[Image.Image, ImageMetadata]:
        """One picture of a job."""
        self.last_used = time.monotonic()
        pipe = self.pipes[work.task]
        call = self._make_call(work, inputs)
        check_image_call(pipe, call)
        size = work.width, work.height
        seeded = {"prompt": work.prompt, "seed": work.seeds[picture], **call}
        output = None
        if self.shared is not None:
            output = self._run_joined(pipe, seeded, work, watcher, size)
        if output is None:
            output = self._run_alone(pipe, seeded, work, watcher, size)
        if any(getattr(output, "nsfw_content_detected", None) or ()):
            raise RefusedError
        image = pick_images(pipe, output)[0]
        recorded = {name: value for name, value in call.items() if not isinstance(value, Image.Image)}
        origin = expected_metadata(self.loaded, work.prompt, work.seeds[picture], recorded)
        left_out = tuple(name for name in call if name not in recorded)
        kept = {**vars(origin), "width": image.width, "height": image.height}
        pipeline = plain_class(pipe).__name__
        return image, ImageMetadata(**{**kept, "pipeline": pipeline, "unrecorded": (*origin.unrecorded, *left_out)})

    @property
    def denoisers(self) -> tuple[str, ...]:
        """The models that run at every step."""
        placement = find_placement(self.pipe)
        return () if placement is None else placement.denoisers

    def close(self) -> None:
        """Let the models run as before."""
        if self.shared is not None:
            self.shared.close()
            self.shared = None

    def _make_call(self, work: JobSpec, inputs: Mapping[str, Image.Image]) -> dict[str, Any]:
        call = {**self.defaults, **work.call()}
        takes = _parameters(self.pipes[work.task])
        size = work.width, work.height
        for name, image in inputs.items():
            call[name] = image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)
        if "height" in takes and "width" in takes:
            call |= {"width": work.width, "height": work.height}
        return call

    def _run_joined(
        self, pipe: Any, call: dict[str, Any], work: JobSpec, watcher: Watcher, size: tuple[int, int]
    ) -> Any:
        """Among others; None where the call has to be run by itself after all."""
        with self.turnstile.entering(_adapter_of(work), is_stopped=watcher.is_stopped):
            if self.shared is None:
                return None
            copied = light_copy(pipe)
            try:
                with watching_steps(copied, watcher, size):
                    return self.shared.run(call, copied)
            except NotFiniteError:
                words = "its picture is not finite"
            except Exception as error:
                if not is_out_of_memory(error) and not isinstance(error, DoesNotFitError):
                    raise
                words = "memory ran out"
                clear_traceback_frames(error)
        _LOG.warning("anyaccel: a call of %s is run again by itself: %s", self.name, words)
        watcher.begin_again()
        return None

    def _run_alone(
        self, pipe: Any, call: dict[str, Any], work: JobSpec, watcher: Watcher, size: tuple[int, int]
    ) -> Any:
        """By itself, with all that the library does for a call that does not fit or is not finite."""
        with self.turnstile.entering(_adapter_of(work), alone=True, is_stopped=watcher.is_stopped):
            shared = self.shared is not None
            self.close()
            try:
                with watching_steps(pipe, watcher, size):
                    return pipe(**call)
            finally:
                if shared:
                    self._return_to_sharing(pipe)

    def _return_to_sharing(self, pipe: Any) -> None:
        """Weights that moved to make a call fit go back; where they cannot, the model is no longer shared."""
        placement = find_placement(pipe)
        try:
            if placement is not None and placement.residence != "resident":
                apply_rule(pipe, placement, placement.weights_rule)
            self._warm_up()
        except Exception as error:  # noqa: BLE001 - the model still serves, one call at a time
            _LOG.warning("anyaccel: calls of %s are no longer joined: %r", self.name, error)
            self.close()
            self._let_in(1)

    def _warm_up(self) -> None:
        """Make one picture of each size, and find out which models can run several calls as one."""
        for width, height in self.sizes:
            self.pipe(**self._trial(_PROMPTS[0], width, height, _STEPS), seed=0)
        self._let_in(1)
        placement = find_placement(self.pipe)
        assert placement is not None
        if placement.residence != "resident" or placement.plan.step_skipping.value is not None:
            return  # weights that move, and steps that are taken again, belong to one call at a time
        most = self._find_most()
        if most == 1:
            return
        shared = SharedPipeline(self.pipe, most_calls=most)
        self.joins = dict.fromkeys(shared.meetings, True)
        for width, height in self.sizes:
            trials = [{**self._trial(prompt, width, height, 2), "seed": place} for place, prompt in enumerate(_PROMPTS)]
            found = shared.warm_up(*trials)
            self.joins = {name: joins and found[name] for name, joins in self.joins.items()}
            if self._is_static():
                shared.prepare_rows(most)
        shared.allow(self.joins)
        if not any(self.joins.get(name) for name in placement.denoisers):
            shared.close()
            return
        self.shared = shared
        self._let_in(most)

    def _let_in(self, at_once: int) -> None:
        """So many pictures are made at once from now on."""
        self.at_once, self.turnstile.at_once = at_once, count_in_hand(at_once)

    def _try_tasks(self) -> None:
        """Run the other tasks once: diffusers has a pipeline for many models that then refuses some of them."""
        width, height = self.sizes[0]
        for task, pipe in list(self.pipes.items()):
            if pipe is self.pipe:
                continue
            inputs = {"image": Image.new("RGB", (width, height), "grey")}
            if task == "inpaint":
                inputs["mask_image"] = Image.new("L", (width, height), "white")
            work = JobSpec(
                task=task, model=self.name, prompt=_PROMPTS[0], seeds=(0,), width=width, height=height,
                num_inference_steps=2,
            )  # fmt: skip
            try:
                self.make(work, 0, inputs, Watcher(lambda done, total: None))
            except (ValueError, TypeError, AttributeError, RuntimeError) as error:
                _LOG.info("anyaccel: %s has no %s: %s", self.name, task, error)
                del self.pipes[task]

    def _is_static(self) -> bool:
        """Whether every size is a graph of its own, which would be made while others wait."""
        plan = self.pipe.plan
        return bool(plan.report.compiled_models or plan.compiler.value.static)

    def _find_most(self) -> int:
        """How many pictures of the largest size fit into the memory at once."""
        placement = find_placement(self.pipe)
        assert placement is not None
        if placement.plan.images_per_call.value == 1:
            return 1
        width, height = max(self.sizes, key=lambda size: size[0] * size[1])
        call = self._trial(_PROMPTS[0], width, height, _STEPS)
        most = self.settings.max_batch
        while most > 1:
            prompts = {**call, "prompt": [_PROMPTS[0]] * most}
            request = read_call_request(self.pipe, plain_class(self.pipe).__call__, (), prompts)
            try:
                rule = plan_call(
                    self.pipe, placement, request, list_call_rules(self.pipe, placement, most)
                ).decision.value
            except DoesNotFitError:
                rule = None
            if rule and rule.residence == "resident" and rule.images_per_call in (None, most):
                return most
            most //= 2
        return 1

    def _trial(self, prompt: str, width: int, height: int, steps: int) -> dict[str, Any]:
        takes = _parameters(self.pipe)
        wanted = {**self.defaults, "num_inference_steps": steps, "width": width, "height": height}
        call = {"prompt": prompt, **{name: value for name, value in wanted.items() if name in takes}}
        if "generate" not in self.pipes and "image" in takes:
            call["image"] = Image.new("RGB", (width, height), "grey")
        if "generate" not in self.pipes and "mask_image" in takes:
            call["mask_image"] = Image.new("L", (width, height), "white")
        return call

    def _load_adapters(self) -> None:
        if not self.settings.loras:
            return
        if not hasattr(self.pipe, "load_lora_weights"):
            raise UsageError(f"{type(self.pipe).__name__} takes no LoRA", hint="leave --lora out")
        for one in self.settings.loras:
            self.pipe.load_lora_weights(one.model, adapter_name=one.name)
        self.pipe.disable_lora()

    def _switch(self, adapter: str | None) -> None:
        """Nobody is inside: let the weights be those of an adapter, or the model's own."""
        if adapter is None:
            self.pipe.disable_lora()
        else:
            name, _, scale = adapter.rpartition("@")
            self.pipe.enable_lora()
            self.pipe.set_adapters([name], adapter_weights=[float(scale)])
        if self.shared is not None:
            self.shared.renew()


def _adapter_of(work: JobSpec) -> str | None:
    return None if work.lora is None else f"{work.lora}@{work.lora_scale}"


def _parameters(pipe: Any) -> list[str]:
    return [name for name in inspect.signature(plain_class(pipe).__call__).parameters if name != "self"]


def _find_pipelines(pipe: Any) -> dict[Task, Any]:
    """The pipelines for what can be asked for, all of the same models."""
    takes = inspect.signature(plain_class(pipe).__call__).parameters
    if "prompt" not in takes:
        raise UsageError(f"{type(pipe).__name__} takes no prompt", hint="serve a model that makes pictures from text")
    found: dict[Task, Any] = {}
    if "image" not in takes or ("strength" not in takes and takes["image"].default is not inspect.Parameter.empty):
        found["generate"] = pipe
    if "image" in takes:
        found["inpaint" if "mask_image" in takes else "edit"] = pipe
    others: tuple[tuple[Task, Any], ...] = (
        ("edit", AutoPipelineForImage2Image),
        ("inpaint", AutoPipelineForInpainting),
    )
    for task, auto in others:
        if task in found:
            continue
        try:
            found[task] = auto.from_pipe(pipe)
        except (ValueError, AttributeError, KeyError) as error:  # diffusers has none for these models
            _LOG.debug("anyaccel: no %s for %s: %s", task, type(pipe).__name__, error)
            continue
        found[task].set_progress_bar_config(disable=True)
    return found
