"""Warmup runs, which do one-time work such as compilation before the first image is generated."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from anyaccel.errors import UsageError
from anyaccel.runtime.call_parameters import find_missing_arguments, read_blocks, read_call_parameters
from anyaccel.runtime.introspection import find_components
from anyaccel.upstream.modular_blocks import progress_bars_disabled, read_progress_bar_config

__all__ = ["preserving_state", "warm_up"]

_INPUT_IMAGE_SIDE = 64


def warm_up(pipe: Any, shapes: Any, arguments: dict[str, Any]) -> None:
    """Run one denoising step for each size in `shapes`, with a single progress bar.

    A size is `(height, width)` or a dict of call arguments. Without `shapes`, run one step with
    `arguments` only. Raise `UsageError` if `shapes` is empty.
    """
    from tqdm.auto import tqdm

    calls = [{**arguments, **_read_shape(shape)} for shape in ([None] if shapes is None else shapes)]
    if not calls:
        hint = "pass at least one shape, for example warmup(shapes=[(512, 512)])"
        raise UsageError("warmup got an empty list of shapes", hint=hint)
    config = read_progress_bar_config(pipe)
    with tqdm(calls, desc="Warming up", disable=config.get("disable")) as bar:
        for call in bar:
            run_one_step(pipe, call)


def run_one_step(pipe: Any, arguments: dict[str, Any]) -> None:
    """Run one denoising step with the given call arguments and placeholders for missing required ones."""
    accepts = set(read_call_parameters(pipe))
    required = _list_required(pipe, accepts, arguments)
    call = {**_make_placeholders(required, arguments), **arguments}
    if "num_inference_steps" in accepts:
        call.setdefault("num_inference_steps", 1)
    with preserving_state(pipe), progress_bars_disabled(pipe):
        pipe(**call)


@contextmanager
def preserving_state(pipe: Any) -> Iterator[None]:
    """Restore the schedulers and the CPU random state after the `with` block."""
    # Later images must be the same with and without a warmup: schedulers cache timesteps, and noise comes from the CPU.
    schedulers = [component for component in find_components(pipe).values() if hasattr(component, "set_timesteps")]
    before = [copy.deepcopy(vars(scheduler)) for scheduler in schedulers]
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        for scheduler, attributes in zip(schedulers, before, strict=True):
            vars(scheduler).clear()
            vars(scheduler).update(attributes)


def _list_required(pipe: Any, accepts: set[str], arguments: dict[str, Any]) -> set[str]:
    """Return the arguments that a call requires, including a strength with which the only step runs."""
    names = {"prompt"} & accepts if "prompt_embeds" not in arguments else set()
    if read_blocks(pipe) is not None:
        # Blocks also accept the inputs of other tasks. With an image, for example, those of image-to-image would run.
        names |= set(find_missing_arguments(pipe, {**dict.fromkeys(names, ""), **arguments}))
        return names | ({"strength"} & accepts if "image" in {*names, *arguments} else set())
    # Text-to-image pipelines may have an optional `image`; with strength or mask_image it is required.
    if accepts & {"strength", "mask_image"}:
        names.add("image")
    return (names | {"mask_image", "strength"}) & accepts


def _make_placeholders(names: set[str], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return placeholders for missing required arguments: a prompt, a gray image, a mask and a strength."""
    from PIL import Image

    size = (arguments.get("width") or _INPUT_IMAGE_SIDE, arguments.get("height") or _INPUT_IMAGE_SIDE)
    placeholders: dict[str, Any] = {
        "prompt": "warm-up",
        "image": Image.new("RGB", size, "grey"),
        "mask_image": Image.new("L", size, "white"),
        "strength": 1.0,  # a lower strength would skip the only step
    }
    return {name: value for name, value in placeholders.items() if name in names and name not in arguments}


def _read_shape(shape: Any) -> dict[str, Any]:
    """Convert `(height, width)`, a dict or None to call arguments; raise `UsageError` for other values."""
    if shape is None:
        return {}
    if isinstance(shape, dict):
        return dict(shape)
    if isinstance(shape, Sequence) and len(shape) == 2 and all(isinstance(side, int) for side in shape):
        return {"height": shape[0], "width": shape[1]}
    hint = "use a pair (height, width), such as (512, 512), or a dict of call arguments"
    raise UsageError(f"{shape!r:.60} is not a valid warmup shape", hint=hint)
