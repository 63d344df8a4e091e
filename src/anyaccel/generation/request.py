"""An order: the pictures that are to be made, each by its prompt and its seed, and how."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anyaccel.call_limits import SIDES, check_side, check_steps, read_seeds
from anyaccel.embedded.model import CALL_DEFAULTS
from anyaccel.errors import UsageError
from anyaccel.generation.model_name import ResolvedModel, resolve_model
from anyaccel.planning.options import check_speed

if TYPE_CHECKING:
    import torch

__all__ = ["GenerationRequest", "make_request"]

_PER_PROMPT = "num_images_per_prompt"
_NOT_OURS = {
    "generator": "give seed= a number, so that the picture can be made again",
    "output_type": "the result holds PIL images; call a pipeline for anything else",
    "return_dict": "the result is always an object",
}
_RANDOM_BITS = 32
"""A seed that nobody chose is short enough to be typed."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """What is to be made."""

    model: ResolvedModel
    pictures: tuple[tuple[str, int], ...]
    """The prompt and the seed of each."""
    call: Mapping[str, Any]
    """The arguments that every call of the pipeline gets besides."""
    device: str | int | torch.device = "auto"
    dtype: str | None = None
    """None takes the device's best."""
    speed: str = "exact"
    """`fast` and `draft` change the picture a little, and more."""


def make_request(
    prompt: str | Sequence[str],
    model: str | os.PathLike[str] | None = None,
    device: str | int | torch.device = "auto",
    seed: int | Sequence[int] | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    speed: str = "exact",
    revision: str | None = None,
    **call: Any,
) -> GenerationRequest:
    """Read what was asked for; what is wrong with it is said before anything is loaded, and torch is imported last.

    A number as the seed begins anew with every prompt: the second picture of each has the number after it.
    """
    call = {name: _check_number(name, _plain(value)) for name, value in call.items()}
    for name, hint in _NOT_OURS.items():
        if name in call:
            raise UsageError(f"{name} is not taken here", hint=hint)
    prompts = _read_prompts(prompt)
    per_prompt = _read_count(call.pop(_PER_PROMPT, 1))
    negative = call.get("negative_prompt", "")
    if not isinstance(negative, str):
        raise UsageError(f"negative_prompt is one text for all pictures, not {negative!r:.60}", hint="give a text")
    _check_text("negative_prompt", negative)
    named = resolve_model(model, revision)
    if named.kind == "embedded":
        call = {**CALL_DEFAULTS, **call}
    seeds = _choose_seeds(seed, len(prompts), per_prompt)
    each = [text for text in prompts for _ in range(per_prompt)]
    pictures = tuple(zip(each, seeds, strict=True))
    kind = None if dtype is None else _read_dtype(dtype)
    check_speed(speed)
    return GenerationRequest(model=named, pictures=pictures, call=call, device=device, dtype=kind, speed=speed)


def _plain(value: Any) -> Any:
    """A number of NumPy's or of torch's as one of Python's, which a record can hold."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _check_number(name: str, value: Any) -> Any:
    """What is no number makes no picture, and no record can hold it."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{name} is a number, not {value}", hint=f"for example {name}=5.0, or leave it out")
    if name in SIDES and value is not None:
        return check_side(name, value)
    return check_steps(value) if name == "num_inference_steps" and value is not None else value


def _read_prompts(prompt: Any) -> list[str]:
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, Sequence) or not prompts or not all(isinstance(text, str) for text in prompts):
        raise UsageError(f"a prompt is a text, or a list of them, not {prompt!r:.60}", hint='for example "a red apple"')
    return [_check_text("a prompt", text) for text in prompts]


def _check_text(what: str, text: str) -> str:
    """Bytes that are no UTF-8 come from a command line as half characters, which no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} is a text in Unicode, not {text!r:.60}", hint="write it in UTF-8") from error
    return text


def _read_count(count: Any) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(f"at least one picture is made of each prompt, not {count!r}", hint="-n 1, or leave it out")
    return count


def _choose_seeds(seed: Any, prompts: int, per_prompt: int) -> tuple[int, ...]:
    """One for each picture; a list may name them for one prompt, or for all."""
    if seed is None:
        seed = secrets.randbits(_RANDOM_BITS)
    if isinstance(seed, Sequence) and not isinstance(seed, str) and len(seed) == prompts * per_prompt:
        return read_seeds(seed, len(seed))
    return read_seeds(seed, per_prompt) * prompts


def _read_dtype(dtype: Any) -> str:
    from anyaccel.backends.device_functions import dtype_name, dtype_of

    name = dtype_name(dtype)
    kind = dtype_of(name)
    if not kind.is_floating_point or kind.itemsize < 2:
        raise UsageError(
            f"a picture is made in a floating type of 16 bits or more, not in {name}", hint="float32, bfloat16, float16"
        )
    return name
