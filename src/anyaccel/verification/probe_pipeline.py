"""Probe that runs a tiny pipeline on a device and on the CPU, and compares the images."""

from __future__ import annotations

from typing import Any

from anyaccel.backends.evidence_files import PipelineFinding
from anyaccel.library_logging import silence_process
from anyaccel.recipes import recipes, run
from anyaccel.recipes.recipe import Recipe
from anyaccel.verification.context import describe_error

__all__ = ["CONDITIONS", "FEW", "TOLERANCE", "configure_process", "probe_pipeline"]

# Default recipes: one for each of the most common kinds of denoiser.
FEW = ("stable-diffusion", "stable-diffusion-xl", "stable-diffusion-3", "flux", "flux-2-klein", "pixart-alpha")
# Allowed difference in float32, relative to the largest value of the image (at least 1).
TOLERANCE = 1e-3
# Relative change of the weights in `measure_sensitivity`.
_PERTURBATION = 1e-6
# A single perturbation may happen to change little, so the largest change of several counts.
_TRIALS = 4
_SENSITIVITY_FACTOR = 10
CONDITIONS = (
    "full float32 precision: torch.set_float32_matmul_precision('highest'), and no TF32 in cuDNN",
    "tiny pipelines with random weights, placed by anyaccel in float32, compared with plain diffusers on the CPU",
    "allowed difference: 1e-3 of the image range or, if larger, ten times the difference on the CPU after a relative "
    "change of the weights by 1e-6",
)


def configure_process(threads: int) -> None:
    """Enable full float32 precision, set the number of CPU threads and silence library warnings."""
    import torch

    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False  # only a flag; works without a GPU
    silence_process()


def probe_pipeline(name: str, device: Any) -> PipelineFinding:
    """Run a recipe with diffusers on the CPU and with anyaccel on the device, and compare the images."""
    from anyaccel.runtime.pipeline import place

    recipe = recipes()[name]
    try:
        expected = run(recipe, recipe.make())
    except Exception as error:  # noqa: BLE001 - other library versions may lack the classes of a recipe
        return _make_finding(recipe, error=f"fails on the CPU too: {describe_error(error)}", right=None)
    try:
        actual = run(recipe, place(recipe.make(), device, dtype="float32"))
    except Exception as error:  # noqa: BLE001 - any failure is a finding, reported with its message
        return _make_finding(recipe, error=describe_error(error), right=False)
    if expected.shape != actual.shape:
        return _make_finding(
            recipe, runs=True, error=f"the shape is {actual.shape}, expected {expected.shape}", right=False
        )
    difference = float(f"{abs(expected - actual).max():.3g}")
    allowed = TOLERANCE * max(1.0, float(abs(expected).max()))
    if difference > allowed:  # the sensitivity takes four more runs on the CPU, so it is measured only if needed
        allowed = max(allowed, _SENSITIVITY_FACTOR * measure_sensitivity(recipe, expected))
    allowed = float(f"{allowed:.3g}")
    return _make_finding(recipe, runs=True, max_difference=difference, allowed=allowed, right=difference <= allowed)


def measure_sensitivity(recipe: Recipe, expected: Any) -> float:
    """Return how much the CPU image changes if each weight changes by a relative amount of about 1e-6.

    Some tiny models with random weights amplify rounding errors a thousandfold, or quantize values to
    discrete codes, so they need a larger tolerance.
    """
    import torch

    differences = []
    for seed in range(_TRIALS):
        pipe: Any = recipe.make()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for component in pipe.components.values():
                for weight in component.parameters() if isinstance(component, torch.nn.Module) else ():
                    weight.mul_(1 + _PERTURBATION * torch.randn(weight.shape, generator=generator).to(weight.dtype))
        differences.append(float(abs(run(recipe, pipe) - expected).max()))
    return max(differences)


def _make_finding(
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
