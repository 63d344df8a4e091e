"""Validation of pipeline calls against the signature and outputs of the pipeline, before and after it is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from PIL import Image

from anyaccel.call_limits import SIDES, check_multiple
from anyaccel.errors import UsageError, nearest
from anyaccel.generation.inputs import INPUT_OPTIONS, assign_inputs
from anyaccel.generation.outputs import read_audio_channels, read_sampling_rate
from anyaccel.generation.pipeline_interface import PipelineInterface, read_interface
from anyaccel.runtime.call_parameters import list_block_outputs, read_blocks, read_call_parameters
from anyaccel.runtime.durations import assign_durations
from anyaccel.runtime.introspection import plain_class

__all__ = [
    "check_image_call",
    "check_outputs",
    "check_size",
    "find_default",
    "find_missing_image",
    "list_missing",
    "list_parameters",
    "map_call",
    "pick_images",
    "select_image_output",
]

# Names that pipeline outputs use for their images.
_OUTPUT_FIELDS = ("images", "image")
# Names that pipeline calls use for an input image.
_INPUT_IMAGES = ("image", "control_image", "mask_image")
_USE_PYTHON = (
    "in Python, load it with anyaccel.DiffusionPipeline.from_pretrained(model), then call pipe.to(device) and pipe(…)"
)
# Parts of the names of pipelines that fail without an input although its default is None (diffusers 0.42).
_REQUIRED_INPUTS: Mapping[str, tuple[str, ...]] = {
    "image": ("Img2Img", "ImageToVideo", "Image2Video", "Inpaint", "Pix2Pix", "ImageEdit", "ImageVariation", "Upscale"),
    "mask_image": ("Inpaint",),
    "video": ("VideoToVideo", "LucyEdit"),
    "audio": ("AudioToAudio",),
}
# Arguments that replace an input image.
_INSTEAD = ("latents", "image_latents", "image_embeds", "masked_image_latents")


def map_call(interface: PipelineInterface, call: Mapping[str, Any], *, prompt: bool) -> dict[str, Any]:
    """Return the arguments of a pipeline call under the names of the pipeline.

    `prompt` is whether the call has a prompt. Raise UsageError for an unknown or missing argument.
    """
    pipe = interface.pipe if interface.is_loaded else None
    arguments = assign_durations(interface.name, interface.parameters, call, pipe)
    audio = {} if pipe is None else {"rate": read_sampling_rate(pipe), "channels": read_audio_channels(pipe)}
    arguments = assign_inputs(interface.name, interface.parameters, interface.components, arguments, **audio)
    known = interface.arguments
    for name in arguments:
        if name not in known:
            as_input = name in SIDES and "image" in arguments
            hint = "omit it: the result has the size of the input" if as_input else f"omit it; {nearest(name, known)}"
            raise UsageError(f"{interface.name} does not accept the argument {name}", hint=hint)
    _check_prompt(interface, arguments, prompt)
    missing = list_missing(interface, arguments, prompt=prompt)
    if missing:
        options = [INPUT_OPTIONS.get(name) or f"--set {name}=…" for name in missing]
        raise UsageError(
            f"{interface.name} requires {' and '.join(missing)}{' in addition to a prompt' if prompt else ''}",
            hint=f"add {' and '.join(f'{option} PATH' if option[-1] != '…' else option for option in options)} "
            f"(in Python {', '.join(f'{name}=…' for name in missing)})",
        )
    return {name: _convert_list(value, interface.parameters.get(name)) for name, value in arguments.items()}


def _convert_list(value: Any, parameter: inspect.Parameter | None) -> Any:
    """Return a list as a tuple if the pipeline accepts only tuples, because JSON has only lists."""
    if not isinstance(value, list) or parameter is None:
        return value
    text = inspect.formatannotation(parameter.annotation).lower()
    return tuple(value) if "tuple[" in text and "list[" not in text and "sequence[" not in text else value


def list_missing(interface: PipelineInterface, arguments: Mapping[str, Any], *, prompt: bool) -> list[str]:
    """Return the names of the arguments that the pipeline requires and the call does not have."""
    passed = {name: value for name, value in arguments.items() if name in interface.parameters}
    return interface.find_missing({**({"prompt": ""} if prompt else {}), **passed}) or _find_input(interface, passed)


def _check_prompt(interface: PipelineInterface, arguments: Mapping[str, Any], prompt: bool) -> None:
    if prompt and "prompt" not in interface.parameters:
        raise UsageError(f"{interface.name} does not accept a prompt", hint="omit the prompt")
    has_embeddings = any(name.startswith("prompt_embeds") for name in arguments)
    if not prompt and "prompt" in interface.parameters and "prompt" not in arguments and not has_embeddings:
        raise UsageError("missing prompt", hint='pass a prompt, for example: anyaccel generate "a red apple"')


def _find_input(interface: PipelineInterface, arguments: Mapping[str, Any]) -> list[str]:
    """Return the inputs without which a pipeline fails although they have a default."""
    if interface.pipeline_class is None or any(arguments.get(name) is not None for name in _INSTEAD):
        return []
    return [
        name
        for name, parts in _REQUIRED_INPUTS.items()
        if name in interface.parameters
        and arguments.get(name) is None
        and any(part in interface.name for part in parts)
    ]


def check_outputs(interface: PipelineInterface) -> None:
    """Raise UsageError if a pipeline is known to generate something else than images, videos or audio."""
    # Otherwise, this would be detected only after the last denoising step.
    if interface.kind is None and interface.outputs:
        raise UsageError(
            f"{interface.name} generates {', '.join(sorted(interface.outputs))}, not images, video or audio",
            hint=_USE_PYTHON,
        )


def check_image_call(pipe: Any, call: Mapping[str, Any]) -> None:
    """Raise UsageError if the pipeline does not generate images from a prompt or rejects an argument.

    Call this before running the pipeline. Otherwise, an unsupported output type would be detected only
    after the last denoising step.
    """
    interface = read_interface(pipe)
    if interface.outputs and interface.kind != "image":
        raise UsageError(
            f"{interface.name} generates {', '.join(sorted(interface.outputs))}, not images", hint=_USE_PYTHON
        )
    map_call(interface, call, prompt=True)
    check_size(pipe, call)


def check_size(pipe: Any, call: Mapping[str, Any]) -> None:
    """Raise UsageError if the height or width is not a multiple of the VAE scale factor."""
    # Some pipelines round such a side and only log a warning, for example FluxPipeline
    # (https://github.com/huggingface/diffusers/issues/9904).
    processor = getattr(pipe, "image_processor", None) or getattr(pipe, "video_processor", None)
    multiple = getattr(getattr(processor, "config", None), "vae_scale_factor", None)
    for name in SIDES:
        side = call.get(name)
        if isinstance(side, int) and isinstance(multiple, int) and multiple > 1:
            check_multiple(name, side, multiple)


def find_default(pipe: Any, name: str) -> Any:
    """Return the default value of a call argument of the pipeline, or None if there is none."""
    return read_interface(pipe).find_default(name)


def find_missing_image(pipe: Any, call: Mapping[str, Any]) -> str | None:
    """Return the first image argument that the pipeline accepts but the call omits, or None."""
    if read_blocks(pipe) is not None:
        return None  # they declare which inputs they require
    parameters = read_call_parameters(pipe)
    return next((name for name in _INPUT_IMAGES if name in parameters and call.get(name) is None), None)


def list_parameters(pipe: Any) -> list[str]:
    """Return the argument names of the pipeline's call, including the guidance scale of a modular pipeline's guider."""
    return read_interface(pipe).arguments


def select_image_output(pipe: Any) -> dict[str, str]:
    """Return the call argument that makes a modular pipeline return its images; none for other pipelines."""
    if read_blocks(pipe) is None:
        return {}
    outputs = list_block_outputs(pipe)
    return {"output": next(name for name in _OUTPUT_FIELDS if name in outputs)}


def pick_images(pipe: Any, output: Any, expected: int = 1) -> list[Image.Image]:
    """Return the images from a pipeline's output; raise if there are not exactly `expected` PIL images."""
    images = output  # of a modular pipeline
    if read_blocks(pipe) is None:
        images = next((value for name in _OUTPUT_FIELDS if (value := getattr(output, name, None)) is not None), None)
    if isinstance(images, list) and len(images) == expected and all(isinstance(item, Image.Image) for item in images):
        return images
    returned = f"an object of type {type(images).__name__}"
    if isinstance(images, list):
        types = " and ".join(sorted({type(item).__name__ for item in images}))
        returned = f"a list of {len(images)} objects of type {types}" if images else "an empty list"
    requested = "one PIL image" if expected == 1 else f"{expected} PIL images"
    raise UsageError(f"{plain_class(pipe).__name__} returned {returned} instead of {requested}", hint=_USE_PYTHON)
