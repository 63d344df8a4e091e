"""Generation requests: prompts, seeds, model, adapters, device and call arguments."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from anyaccel.call_limits import SIDES, check_side, check_steps, read_seeds
from anyaccel.embedded.model import CALL_DEFAULTS
from anyaccel.embedded.motion import choose_name, fit_video_call
from anyaccel.errors import UsageError
from anyaccel.generation.adapters import Additions, read_additions
from anyaccel.generation.input_files import read_inputs
from anyaccel.generation.model_name import ResolvedModel, resolve_model
from anyaccel.planning.options import check_speed, check_weights
from anyaccel.runtime.durations import DURATION_OPTIONS, check_duration

if TYPE_CHECKING:
    import torch

    from anyaccel.backends.device import OpenDevice

__all__ = ["GenerationRequest", "make_request"]

_PER_PROMPT = ("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt")
# Pipeline arguments that `generate` sets itself, each with a hint.
_UNSUPPORTED = {
    "generator": "pass seed= with an integer instead; the seed is stored with the image",
    "output_type": "omit it: the result contains PIL images, videos or audio; for others, call the pipeline itself",
    "return_dict": "omit it: the result is always an object",
}
# Bits of a random seed. torch accepts 64, but a shorter seed is easier to type.
_RANDOM_BITS = 32


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A validated request to generate images, videos or audio: prompts, seeds, model, device and call arguments."""

    model: ResolvedModel
    images: tuple[tuple[str | None, int], ...]
    """Prompt and seed of each image, video or audio; the prompt is None if there is none."""
    call: Mapping[str, Any]
    """Further arguments of every pipeline call, with `frames`, `fps`, `seconds` and the inputs under general names."""
    additions: Additions = field(default_factory=Additions)
    """LoRAs, IP-Adapters, ControlNets and the scheduler."""
    device: str | int | torch.device | OpenDevice = "auto"
    dtype: str | None = None
    """None for the preferred dtype of the device."""
    speed: str = "exact"
    """`exact`, `fast` or `draft`; `fast` changes the image a little, `draft` more."""
    weights: str | None = None
    """Format of quantized weights, such as `int8`; None to keep the weights as they are."""


def make_request(
    prompt: str | Sequence[str] | None = None,
    model: str | os.PathLike[str] | None = None,
    device: str | int | torch.device = "auto",
    seed: int | Sequence[int] | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    speed: str = "exact",
    weights: str | None = None,
    revision: str | None = None,
    lora: Any = None,
    ip_adapter: Any = None,
    controlnet: Any = None,
    scheduler: str | None = None,
    **call: Any,
) -> GenerationRequest:
    """Validate the arguments, read the input files and return a generation request, without loading the model.

    `call` contains additional arguments for the pipeline call. An integer seed is used for the first
    image of every prompt, and consecutive seeds for its other images. None selects a random seed.
    """
    call = {name: _check_value(name, _to_python_scalar(value)) for name, value in call.items()}
    for name, hint in _UNSUPPORTED.items():
        if name in call:
            raise UsageError(f"anyaccel.generate does not accept the argument {name}", hint=hint)
    prompts: Sequence[str | None] = [None] if prompt is None else _read_prompts(prompt)
    per_prompt = _read_count(next((call.pop(name) for name in _PER_PROMPT if name in call), 1))
    negative = "" if call.get("negative_prompt") is None else call["negative_prompt"]
    if not isinstance(negative, str):
        raise UsageError(
            f"negative_prompt must be one string for all images, not {negative!r:.60}",
            hint='for example negative_prompt="blurry"',
        )
    _check_text("negative_prompt", negative)
    resolved = resolve_model(choose_name(model, call), revision)
    # The defaults of StableDiffusionPipeline are meant for much larger models.
    if resolved.kind == "embedded":
        call = {**CALL_DEFAULTS, **(fit_video_call(call) if resolved.with_motion else call)}
    seeds = _choose_seeds(seed, len(prompts), per_prompt)
    repeated = [text for text in prompts for _ in range(per_prompt)]
    images = tuple(zip(repeated, seeds, strict=True))
    additions = read_additions(lora, ip_adapter, controlnet, scheduler)
    call = read_inputs(call)
    # Last, because it imports torch, which takes seconds; other mistakes are reported before.
    full_dtype = None if dtype is None else _read_dtype(dtype)
    check_speed(speed)
    check_weights(weights)
    return GenerationRequest(
        model=resolved,
        images=images,
        call=call,
        additions=additions,
        device=device,
        dtype=full_dtype,
        speed=speed,
        weights=weights,
    )


def _to_python_scalar(value: Any) -> Any:
    """Convert a NumPy or torch scalar to a Python scalar; return any other value unchanged."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _check_value(name: str, value: Any) -> Any:
    """Return a pipeline call argument; raise if it is NaN, infinite, or an invalid size or step count."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{name} must be finite, not {value}", hint=f"for example {name}=5.0, or omit it")
    if name in SIDES and value is not None:
        return check_side(name, value)
    if name in DURATION_OPTIONS and value is not None:
        return check_duration(name, value)
    return check_steps(value) if name == "num_inference_steps" and value is not None else value


def _read_prompts(prompt: Any) -> list[str]:
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, Sequence) or not prompts or not all(isinstance(text, str) for text in prompts):
        raise UsageError(
            f"the prompt must be a string or a list of strings, not {prompt!r:.60}", hint='for example "a red apple"'
        )
    return [_check_text("the prompt", text) for text in prompts]


def _check_text(name: str, text: str) -> str:
    """Validate and return a text argument; raise if it is not valid Unicode."""
    try:
        # Python decodes invalid bytes on the command line to lone surrogates, which UTF-8 files cannot contain.
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{name} is not valid Unicode: {text!r:.60}", hint="pass text that is encoded as UTF-8"
        ) from error
    return text


def _read_count(count: Any) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(
            f"the number of images per prompt must be a positive integer, not {count!r}",
            hint="for example -n 1 on the command line, or num_images_per_prompt=1 in Python",
        )
    return count


def _choose_seeds(seed: Any, prompts: int, per_prompt: int) -> tuple[int, ...]:
    """Return one seed per image; if `seed` is None, choose a random one.

    A list contains one seed per image, or one seed per image of a prompt, reused for every prompt. An
    integer is the first of the consecutive seeds that every prompt uses.
    """
    if seed is None:
        seed = secrets.randbits(_RANDOM_BITS)
    if isinstance(seed, Sequence) and not isinstance(seed, str) and len(seed) == prompts * per_prompt:
        return read_seeds(seed, len(seed))
    return read_seeds(seed, per_prompt) * prompts


def _read_dtype(dtype: Any) -> str:
    from anyaccel.backends.device_functions import dtype_name, dtype_of

    name = dtype_name(dtype)
    torch_dtype = dtype_of(name)
    if not torch_dtype.is_floating_point or torch_dtype.itemsize < 2:
        raise UsageError(
            f"dtype must be a floating-point dtype with at least 16 bits, not {name}",
            hint="use float32, bfloat16 or float16",
        )
    return name
