"""A tiny pipeline, placed on a device and held against the CPU's picture."""

from __future__ import annotations

from typing import Any

from anyaccel.backends.evidence import PipelineFinding
from anyaccel.library_logging import silence_process
from anyaccel.recipes import recipes, run
from anyaccel.recipes.recipe import Recipe
from anyaccel.verification.context import describe_error

__all__ = ["CONDITIONS", "FEW", "TOLERANCE", "probe_pipeline", "settle_process"]

FEW = ("stable-diffusion", "stable-diffusion-xl", "stable-diffusion-3", "flux", "flux-2-klein", "pixart-alpha")
"""One of each kind of denoiser that people run most."""
TOLERANCE = 1e-3
"""Of the range of a picture, which is at least from 0 to 1, in float32."""
_LAST_DIGITS = 1e-6
_TRIALS = 4
_TIMES = 10
CONDITIONS = (
    "float32 products and convolutions in full: torch.set_float32_matmul_precision('highest'), and no TF32 in cuDNN",
    "tiny pipelines with random weights, placed by anyaccel in float32, against plain diffusers on the CPU",
    "a picture may differ by 1e-3 of its range, or by ten times what the CPU's own differs by when its weights change "
    "by one part in a million, whichever is more",
)


def settle_process(threads: int) -> None:
    """Make float32 mean float32, and share the cores; nobody reads the warnings of a tiny pipeline."""
    import torch

    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False  # takes no GPU: without one it is only a switch
    silence_process()


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
    allowed = TOLERANCE * max(1.0, float(abs(expected).max()))
    if difference > allowed:
        allowed = max(allowed, _TIMES * measure_sensitivity(recipe, expected))
    allowed = float(f"{allowed:.3g}")
    return _tell(recipe, runs=True, max_difference=difference, allowed=allowed, right=difference <= allowed)


def measure_sensitivity(recipe: Recipe, expected: Any) -> float:
    """How far the CPU's own picture moves when weights change in their last digits: what rounding alone may do.

    Some tiny models with random weights choose between codes, or amplify every rounding error a thousandfold.
    """
    import torch

    moved = []
    for seed in range(_TRIALS):
        pipe: Any = recipe.make()
        chance = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for component in pipe.components.values():
                for weight in component.parameters() if isinstance(component, torch.nn.Module) else ():
                    weight.mul_(1 + _LAST_DIGITS * torch.randn(weight.shape, generator=chance).to(weight.dtype))
        moved.append(float(abs(run(recipe, pipe) - expected).max()))
    return max(moved)


def _tell(
    recipe: Recipe,
    *,
    right: bool | None,
    runs: bool = False,
    error: str = "",
    max_difference: float | None = None,
    allowed: float = TOLERANCE,
) -> PipelineFinding:
    return PipelineFinding(
        recipe=recipe.name,
        pipeline=recipe.pipeline,
        dtype="float32",
        runs=runs,
        error=error,
        max_difference=max_difference,
        tolerance=allowed,
        right=right,
    )
