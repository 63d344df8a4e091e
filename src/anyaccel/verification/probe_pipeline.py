"""A tiny pipeline, placed on a device and held against the CPU's picture."""

from __future__ import annotations

import logging
import warnings
from typing import Any

from anyaccel.backends.evidence import PipelineFinding
from anyaccel.recipes import recipes, run
from anyaccel.recipes.recipe import Recipe
from anyaccel.verification.bench import describe_error

__all__ = ["CONDITIONS", "FEW", "TOLERANCE", "probe_pipeline", "settle_process"]

FEW = ("stable-diffusion", "stable-diffusion-xl", "stable-diffusion-3", "flux", "flux-2-klein", "pixart-alpha")
"""One of each kind of denoiser that people run most."""
TOLERANCE = 1e-3
"""Of pictures from 0 to 1, in float32."""
CONDITIONS = (
    "float32 products and convolutions in full: torch.set_float32_matmul_precision('highest'), and no TF32 in cuDNN",
    "tiny pipelines with random weights, placed by anyaccel in float32, against plain diffusers on the CPU",
)


def settle_process(threads: int) -> None:
    """Make float32 mean float32, and share the cores; nobody reads the warnings of a tiny pipeline."""
    import torch

    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False  # takes no GPU: without one it is only a switch
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def probe_pipeline(name: str, device: Any) -> PipelineFinding:
    """Run one recipe in plain diffusers on the CPU, and placed on the device."""
    from anyaccel.runtime.pipeline import place

    recipe = recipes()[name]
    try:
        expected = run(recipe, recipe.make())
    except Exception as error:  # noqa: BLE001 - libraries of other versions lack what a recipe is made of
        return _tell(recipe, error=f"not on this CPU either: {describe_error(error)}", right=None)
    try:
        seen = run(recipe, place(recipe.make(), device, dtype="float32"))
    except Exception as error:  # noqa: BLE001 - a failure is a finding here, and is shown with its words
        return _tell(recipe, error=describe_error(error), right=False)
    if expected.shape != seen.shape:
        return _tell(recipe, runs=True, error=f"its shape is {seen.shape}, not {expected.shape}", right=False)
    difference = float(f"{abs(expected - seen).max():.3g}")
    return _tell(recipe, runs=True, max_difference=difference, right=difference <= TOLERANCE)


def _tell(
    recipe: Recipe, *, right: bool | None, runs: bool = False, error: str = "", max_difference: float | None = None
) -> PipelineFinding:
    return PipelineFinding(
        recipe=recipe.name,
        pipeline=recipe.pipeline,
        dtype="float32",
        runs=runs,
        error=error,
        max_difference=max_difference,
        tolerance=TOLERANCE,
        right=right,
    )
