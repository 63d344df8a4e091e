"""A recipe: how to make one tiny pipeline, how to call it, and how to read what it gives."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anyaccel.errors import AnyaccelError
from anyaccel.recipes.lazy_modules import diffusers, numpy, torch
from anyaccel.recipes.parts.weights import draw_weights

if TYPE_CHECKING:
    import numpy.typing as npt
    from diffusers import DiffusionPipeline

__all__ = ["Recipe", "assemble", "make_recipe", "run"]

SEED = 20


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One pipeline class at its smallest, and one call of it."""

    name: str
    """Unique, in kebab-case: `stable-diffusion`."""
    pipeline: str
    """The name of the diffusers class: `StableDiffusionPipeline`."""
    family: str
    """What it is kin to: `stable-diffusion`, `flux`, `video`, `audio`."""
    make: Callable[[], DiffusionPipeline]
    """A new pipeline: float32, for inference, with the same weights every time."""
    call: Callable[[], dict[str, Any]]
    """The keyword arguments of one call, new every time."""


def make_recipe(
    *,
    name: str,
    pipeline: str,
    family: str,
    parts: Callable[[], dict[str, Any]],
    call: Callable[[], dict[str, Any]],
    finish: Callable[[Any], None] | None = None,
) -> Recipe:
    """A recipe whose pipeline is put together from parts: its components, and what its constructor takes besides."""
    make = functools.partial(assemble, pipeline, parts, finish)
    return Recipe(name=name, pipeline=pipeline, family=family, make=make, call=call)


def assemble(
    pipeline: str, parts: Callable[[], dict[str, Any]], finish: Callable[[Any], None] | None = None
) -> DiffusionPipeline:
    """Build the parts and the pipeline, add what comes later, such as an adapter, and draw weights from fixed seeds.

    The caller's randomness is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        pipe: Any = getattr(diffusers, pipeline)(**parts())
        if finish:
            finish(pipe)
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module):
            # Seeded by its name, so that no two encoders are the same.
            draw_weights(component.eval(), seed=SEED + zlib.crc32(name.encode()))
    pipe.set_progress_bar_config(disable=True)
    return pipe  # type: ignore[no-any-return]


def run(recipe: Recipe, pipe: DiffusionPipeline) -> npt.NDArray[Any]:
    """Call the pipeline once as the recipe says, and give its main output as one finite float32 array."""
    # Some pipelines draw from torch's own generator, whatever generator they are given: CogView 4 with control.
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        output = pipe(**_place(recipe.call(), pipe.device))  # type: ignore[operator,attr-defined]
    values = output.to_tuple() if hasattr(output, "to_tuple") else (output,)  # a modular pipeline gives one value
    array: npt.NDArray[Any] = _as_array(next(value for value in values if value is not None))
    if not numpy.isfinite(array).all():
        raise AnyaccelError(
            f"the recipe {recipe.name} gave {int((~numpy.isfinite(array)).sum())} numbers of {array.size} "
            "that are not finite",
            hint="compare with a run on the cpu, where every recipe is finite",
        )
    return array


def _place(arguments: dict[str, Any], device: Any) -> dict[str, Any]:
    """The arguments with their tensors where the pipeline is, as a caller who has embeddings would give them."""
    import torch

    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


def _as_array(value: Any) -> Any:
    """One float32 array from a tensor, an array, a picture, or lists of them."""
    if isinstance(value, list | tuple):
        return numpy.stack([_as_array(entry) for entry in value])
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().float().numpy()
    return numpy.asarray(value, dtype=numpy.float32)
