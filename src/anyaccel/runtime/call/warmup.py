"""Warmup runs, which do one-time work such as compilation before the first image is generated."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from anyaccel.errors import UsageError
from anyaccel.runtime.introspection import find_components
from anyaccel.upstream.diffusers_internals import read_progress_bar_config

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
    accepts = _list_arguments(pipe)
    call = {**_make_required(accepts, arguments), **arguments}
    if "num_inference_steps" in accepts:
        call.setdefault("num_inference_steps", 1)
    with preserving_state(pipe):
        pipe.set_progress_bar_config(disable=True)
        pipe(**call)


@contextmanager
def preserving_state(pipe: Any) -> Iterator[None]:
    """Restore the schedulers, the CPU random state and the progress bar settings after the `with` block."""
    # Later images must be the same with and without a warmup: schedulers cache timesteps, and noise comes from the CPU.
    schedulers = [component for component in find_components(pipe).values() if hasattr(component, "set_timesteps")]
    before = [copy.deepcopy(vars(scheduler)) for scheduler in schedulers]
    state, config = torch.get_rng_state(), read_progress_bar_config(pipe)
    try:
        yield
    finally:
        torch.set_rng_state(state)
        for scheduler, attributes in zip(schedulers, before, strict=True):
            vars(scheduler).clear()
            vars(scheduler).update(attributes)
        pipe.set_progress_bar_config(**config)


def _list_arguments(pipe: Any) -> set[str]:
    """Return the names of a pipeline's call arguments and, if it is modular, of its blocks' inputs."""
    import inspect

    names = set(inspect.signature(pipe.__call__).parameters)
    blocks = getattr(pipe, "blocks", None)
    return names | set(getattr(blocks, "input_names", ()) or ())


def _make_required(accepts: set[str], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return placeholders for missing required arguments: a prompt, a gray image, a mask and a strength."""
    from PIL import Image

    required: dict[str, Any] = {}
    if "prompt" in accepts and "prompt_embeds" not in arguments:
        required["prompt"] = "warm-up"
    size = (arguments.get("width") or _INPUT_IMAGE_SIDE, arguments.get("height") or _INPUT_IMAGE_SIDE)
    # Text-to-image pipelines may have an optional `image`; with strength or mask_image it is required.
    if "image" in accepts and accepts & {"strength", "mask_image"}:
        required["image"] = Image.new("RGB", size, "grey")
    if "mask_image" in accepts:
        required["mask_image"] = Image.new("L", size, "white")
    if "strength" in accepts:
        required["strength"] = 1.0  # a lower strength would skip the only step
    return {name: value for name, value in required.items() if name not in arguments}


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
