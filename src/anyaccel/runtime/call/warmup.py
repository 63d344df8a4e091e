"""Warming up: one step at each declared size, which leaves no trace but what was compiled."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from anyaccel.errors import UsageError
from anyaccel.runtime.introspection import find_components
from anyaccel.upstream.diffusers_internals import read_progress_bar_config

__all__ = ["leaving_no_trace", "warm_up"]

_SIZE = 64


def warm_up(pipe: Any, shapes: Any, arguments: dict[str, Any]) -> None:
    """Run one step at each size, under one progress bar: `[(512, 512), {"height": 768, "width": 512}]`."""
    from tqdm.auto import tqdm

    calls = [{**arguments, **_read_shape(shape)} for shape in ([None] if shapes is None else shapes)]
    if not calls:
        raise UsageError("no shape was given to warm up", hint="warmup(shapes=[(512, 512)])")
    config = read_progress_bar_config(pipe)
    with tqdm(calls, desc="Warming up", disable=config.get("disable")) as bar:
        for call in bar:
            run_one_step(pipe, call)


def run_one_step(pipe: Any, arguments: dict[str, Any]) -> None:
    """One step with these arguments, and what the pipeline must have besides."""
    accepts = _accepted(pipe)
    call = {**_needed(accepts, arguments), **arguments}
    if "num_inference_steps" in accepts:
        call.setdefault("num_inference_steps", 1)
    with leaving_no_trace(pipe):
        pipe.set_progress_bar_config(disable=True)
        pipe(**call)


@contextmanager
def leaving_no_trace(pipe: Any) -> Iterator[None]:
    """Put back the schedulers, the random numbers of the host and the progress bar's settings."""
    schedulers = [part for part in find_components(pipe).values() if hasattr(part, "set_timesteps")]
    before = [copy.deepcopy(vars(scheduler)) for scheduler in schedulers]
    state, config = torch.get_rng_state(), read_progress_bar_config(pipe)
    try:
        yield
    finally:
        torch.set_rng_state(state)
        for scheduler, kept in zip(schedulers, before, strict=True):
            vars(scheduler).clear()
            vars(scheduler).update(kept)
        pipe.set_progress_bar_config(**config)


def _accepted(pipe: Any) -> set[str]:
    import inspect

    names = set(inspect.signature(pipe.__call__).parameters)
    blocks = getattr(pipe, "blocks", None)
    return names | set(getattr(blocks, "input_names", ()) or ())


def _needed(accepts: set[str], given: dict[str, Any]) -> dict[str, Any]:
    """A prompt, a grey picture and a mask, for the pipelines that cannot do without."""
    from PIL import Image

    needed: dict[str, Any] = {}
    if "prompt" in accepts and "prompt_embeds" not in given:
        needed["prompt"] = "warm-up"
    size = (given.get("width") or _SIZE, given.get("height") or _SIZE)
    if "image" in accepts and accepts & {"strength", "mask_image"}:
        needed["image"] = Image.new("RGB", size, "grey")
    if "mask_image" in accepts:
        needed["mask_image"] = Image.new("L", size, "white")
    if "strength" in accepts:
        needed["strength"] = 1.0
    return {name: value for name, value in needed.items() if name not in given}


def _read_shape(shape: Any) -> dict[str, Any]:
    """`(512, 768)` is a height and a width; a dictionary is taken as it is."""
    if shape is None:
        return {}
    if isinstance(shape, dict):
        return dict(shape)
    if isinstance(shape, Sequence) and len(shape) == 2 and all(isinstance(side, int) for side in shape):
        return {"height": shape[0], "width": shape[1]}
    raise UsageError(f"{shape!r} is no shape", hint="a shape is (height, width), or a dictionary of call arguments")
