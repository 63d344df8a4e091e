"""Functions that generate images, videos and audio from prompts, inputs and seeds, and record their metadata."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image

from anyaccel.backends.device import this_machine
from anyaccel.generation.call_errors import translating_errors
from anyaccel.generation.call_validation import check_outputs, check_size, find_default, map_call
from anyaccel.generation.guider import using_guidance_scale
from anyaccel.generation.metadata import MediaMetadata, record_call
from anyaccel.generation.model_loading import LoadedModel
from anyaccel.generation.outputs import collect_media, select_outputs
from anyaccel.generation.pipeline_interface import read_interface
from anyaccel.generation.progress import counting_steps
from anyaccel.generation.recorded_files import record_adapters, record_inputs
from anyaccel.generation.tasks import find_pipe, list_inputs
from anyaccel.media.types import Audio, Media, Video
from anyaccel.planning.plan import Plan
from anyaccel.progress import ProgressListener
from anyaccel.quantized_weights.quantize import read_error
from anyaccel.runtime.durations import choose_frame_rate
from anyaccel.runtime.introspection import find_components, find_models, plain_class
from anyaccel.runtime.placement_state import find_options

__all__ = [
    "GeneratedMedia",
    "describe_result",
    "expected_metadata",
    "generate_batch",
    "generate_one",
    "group_ip_images",
]

# Packages that can change an image from one version to the next.
_PACKAGES = ("anyaccel", "diffusers", "torch", "transformers")


@dataclass(frozen=True, kw_only=True)
class GeneratedMedia:
    """A generated image, video or audio, with its metadata, plan and generation time."""

    media: Media
    metadata: MediaMetadata
    plan: Plan
    seconds: float
    """Duration of the call, divided by the number of its results."""
    note: str = ""
    """Note for the user, for example that the frame rate is a guess."""

    @property
    def image(self) -> Image.Image:
        """The generated image; raises TypeError for video and audio."""
        if not isinstance(self.media, Image.Image):
            raise TypeError(f"the result is {self.metadata.kind}, not an image")
        return self.media


def generate_one(
    loaded: LoadedModel,
    prompt: str | None,
    seed: int,
    call: Mapping[str, Any],
    listener: ProgressListener | None = None,
) -> GeneratedMedia:
    """Generate one image, video or audio in its own pipeline call, so that it does not depend on others."""
    # Not batched: kernels round differently for other batch sizes, so an image would depend on the others in its batch
    # (https://github.com/huggingface/diffusers/issues/2659).
    return generate_batch(loaded, [prompt], [seed], call, listener)[0]


def generate_batch(
    loaded: LoadedModel,
    prompts: Sequence[str | None],
    seeds: Sequence[int],
    call: Mapping[str, Any],
    listener: ProgressListener | None = None,
) -> list[GeneratedMedia]:
    """Generate one image per prompt in a single pipeline call; videos, audio and calls with inputs one at a time.

    The images differ only by rounding from those generated one at a time.
    """
    pipe, count = find_pipe(loaded, call), len(prompts)
    interface = read_interface(pipe)
    check_outputs(interface)
    if count > 1 and (interface.kind != "image" or list_inputs(call)):
        pairs = zip(prompts, seeds, strict=True)
        return [generate_one(loaded, prompt, seed, call, listener) for prompt, seed in pairs]
    has_prompt = "prompt" in interface.parameters and prompts[0] is not None
    mapped = map_call(interface, call, prompt=has_prompt or bool(prompts[0]))
    check_size(pipe, mapped)
    mapped |= group_ip_images(mapped, len(loaded.additions.ip_adapters))
    arguments = {**({"prompt": prompts[0]} if has_prompt else {}), "seed": seeds[0], **mapped}
    if count > 1:
        # Pipelines require one negative prompt per prompt, and reject a string next to a list.
        texts = {name: [text] * count for name, text in mapped.items() if "prompt" in name and isinstance(text, str)}
        arguments = {**arguments, "prompt": list(prompts), "seed": list(seeds), **texts}
    fps, note = choose_frame_rate(interface.name, interface.parameters, call)
    start = time.perf_counter()
    with (
        counting_steps(pipe, listener),
        translating_errors(pipe, mapped),
        using_guidance_scale(pipe, arguments) as passed,
    ):
        output = pipe(**{**passed, **select_outputs(interface)})
    results = collect_media(interface, output, fps, count)
    seconds = (time.perf_counter() - start) / count
    return [
        GeneratedMedia(
            media=media,
            metadata=describe_result(expected_metadata(loaded, prompt, seed, call), media),
            plan=pipe.plan,
            seconds=seconds,
            note=note if isinstance(media, Video) else "",
        )
        for media, prompt, seed in zip(results, prompts, seeds, strict=True)
    ]


def group_ip_images(arguments: Mapping[str, Any], adapters: int) -> dict[str, Any]:
    """Return several images for a single IP-Adapter as a list in a list, as diffusers expects them."""
    images = arguments.get("ip_adapter_image")
    return {"ip_adapter_image": [images]} if adapters == 1 and isinstance(images, list) else {}


def describe_result(metadata: MediaMetadata, media: Media) -> MediaMetadata:
    """Return the metadata with the actual size and length of a result."""
    if isinstance(media, Audio):
        return replace(metadata, kind="audio", sampling_rate=media.rate)
    if isinstance(media, Video):
        rate = None if media.audio is None else media.audio.rate
        length = len(media.frames)
        metadata = replace(metadata, kind="video", fps=media.fps, frames=length, sampling_rate=rate)
    return replace(metadata, width=media.width, height=media.height)


def expected_metadata(loaded: LoadedModel, prompt: str | None, seed: int, call: Mapping[str, Any]) -> MediaMetadata:
    """Return the metadata for an image that has not been generated yet; its width and height are 0."""
    pipe = find_pipe(loaded, call)
    plan = pipe.plan
    scheduler, scheduler_config = _read_scheduler(pipe)
    recorded, unrecorded = record_call(call)
    versions = this_machine().versions
    return MediaMetadata(
        model=loaded.model.name,
        revision=loaded.revision,
        pipeline=plain_class(pipe).__name__,
        prompt=prompt or "",
        seed=seed,
        width=0,
        height=0,
        dtype=plan.dtype.value,
        speed=find_options(pipe).speed,
        weights=find_options(pipe).weights,
        weight_errors=_read_weight_errors(pipe),
        device=plan.device,
        virtual=plan.virtual,
        negative_prompt=call.get("negative_prompt"),
        steps=_read_scalar(pipe, call, "num_inference_steps"),
        guidance=_read_scalar(pipe, call, "guidance_scale"),
        scheduler=scheduler,
        scheduler_config=scheduler_config,
        versions={name: versions[name] for name in _PACKAGES if name in versions},
        call=recorded,
        unrecorded=unrecorded,
        inputs=record_inputs(call),
        adapters=record_adapters(loaded.additions.adapters),
        requested_scheduler=loaded.additions.scheduler,
    )


def _read_weight_errors(pipe: Any) -> dict[str, float]:
    errors = {name: read_error(model) for name, model in find_models(pipe).items()}
    return {name: round(error.mean, 5) for name, error in errors.items() if error is not None}


def _read_scalar(pipe: Any, call: Mapping[str, Any], name: str) -> Any:
    """Return a numeric call argument or its default, or None if the value is not a number."""
    value = call.get(name, find_default(pipe, name))
    return value if isinstance(value, int | float) else None


def _read_scheduler(pipe: Any) -> tuple[str | None, dict[str, Any]]:
    """Return the class name and config of the scheduler, or of the first one if a pipeline has several."""
    components = find_components(pipe)
    scheduler = components.get("scheduler") or next(
        (component for component in components.values() if hasattr(component, "set_timesteps")), None
    )
    if scheduler is None:
        return None, {}
    # Some configs contain infinity, which is not valid JSON; store it as a string.
    return type(scheduler).__name__, json.loads(scheduler.to_json_string(), parse_constant=str)
