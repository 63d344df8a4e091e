"""Recipes, which define how to build a tiny pipeline and which arguments to call it with."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anyaccel.errors import AnyaccelError
from anyaccel.recipes.lazy_modules import diffusers, numpy, torch
from anyaccel.recipes.parts.weights import draw_weights
from anyaccel.upstream.modular_blocks import disable_progress_bars

if TYPE_CHECKING:
    import numpy.typing as npt
    from diffusers import DiffusionPipeline

__all__ = ["Recipe", "assemble", "make_recipe", "run"]

SEED = 20


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named pair of functions: one builds a tiny pipeline, the other returns its call arguments."""

    name: str
    """Unique name in kebab-case: `stable-diffusion`."""
    pipeline: str
    """Name of the diffusers class: `StableDiffusionPipeline`."""
    family: str
    """Model family: `stable-diffusion`, `flux`, `video`, `audio`."""
    make: Callable[[], DiffusionPipeline]
    """Returns a new float32 pipeline in eval mode, with the same weights every time."""
    call: Callable[[], dict[str, Any]]
    """Returns new keyword arguments for one call."""
    prepare: Callable[[Any], None] | None = None
    """Prepares the pipeline before each call: LEDITS++ inverts the image that it then edits."""


def make_recipe(
    *,
    name: str,
    pipeline: str,
    family: str,
    parts: Callable[[], dict[str, Any]],
    call: Callable[[], dict[str, Any]],
    finish: Callable[[Any], None] | None = None,
    prepare: Callable[[Any], None] | None = None,
) -> Recipe:
    """Return a recipe that builds a pipeline with `assemble` and gets its call arguments from `call`.

    `parts` returns the pipeline's components and other constructor arguments. For a modular pipeline, these are the
    components and config values that its blocks expect and, to replace the default ones, the `blocks`.
    """
    make = functools.partial(assemble, pipeline, parts, finish)
    return Recipe(name=name, pipeline=pipeline, family=family, make=make, call=call, prepare=prepare)


def assemble(
    pipeline: str, parts: Callable[[], dict[str, Any]], finish: Callable[[Any], None] | None = None
) -> DiffusionPipeline:
    """Build a diffusers pipeline, call `finish` on it and set its weights to fixed random values.

    `finish` may, for example, load an adapter. Torch's global random state does not change.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        pipe: Any = _construct(getattr(diffusers, pipeline), parts())
        if finish:
            finish(pipe)
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module):
            # The seed depends on the name, so two encoders of one class have different weights. crc32, because hash()
            # of a string differs between processes.
            draw_weights(component.eval(), seed=SEED + zlib.crc32(name.encode()))
    disable_progress_bars(pipe)
    return pipe  # type: ignore[no-any-return]


def _construct(pipeline_class: Any, parts: dict[str, Any]) -> Any:
    """Return a pipeline with the given parts."""
    if not issubclass(pipeline_class, diffusers.ModularPipeline):
        return pipeline_class(**parts)
    pipe = pipeline_class(blocks=parts.pop("blocks", None))
    unexpected = parts.keys() - {*pipe.components, *pipe.config}
    if unexpected:  # diffusers only logs a warning
        raise AnyaccelError(
            f"the blocks of {pipeline_class.__name__} do not expect {', '.join(sorted(unexpected))}",
            hint="remove these parts from the recipe",
        )
    pipe.update_components(**parts)
    return pipe


def run(recipe: Recipe, pipe: DiffusionPipeline) -> npt.NDArray[Any]:
    """Call the pipeline with the recipe's arguments and return its main output as a float32 array.

    Raise `AnyaccelError` if the output contains NaN or Inf.
    """
    # Some pipelines ignore `generator` and draw from the global one, for example CogView 4 with control.
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        if recipe.prepare:
            recipe.prepare(pipe)
        output = pipe(**_move_tensors(recipe.call(), pipe.device))  # type: ignore[operator,attr-defined]
    # A modular pipeline returns a plain value instead of an output object.
    values = output.to_tuple() if hasattr(output, "to_tuple") else (output,)
    array: npt.NDArray[Any] = _as_array(next(value for value in values if value is not None))
    if not numpy.isfinite(array).all():
        raise AnyaccelError(
            f"the recipe {recipe.name} produced NaN or Inf in {int((~numpy.isfinite(array)).sum())} of {array.size} "
            "elements",
            hint="compare with a run on the CPU, where all recipes produce only finite values",
        )
    return array


def _move_tensors(arguments: dict[str, Any], device: Any) -> dict[str, Any]:
    """Return the call arguments with all tensors moved to a device."""
    import torch

    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


def _as_array(value: Any) -> Any:
    """Convert a tensor, an array, an image, or nested lists of them to a float32 array."""
    if isinstance(value, list | tuple):
        return numpy.stack([_as_array(entry) for entry in value])
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().float().numpy()
    return numpy.asarray(value, dtype=numpy.float32)
