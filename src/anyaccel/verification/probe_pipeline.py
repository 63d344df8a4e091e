"""Probe that runs a tiny pipeline on a device and on the CPU, and compares the images."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy

from anyaccel.backends.evidence_files import PipelineFinding
from anyaccel.library_logging import silence_process
from anyaccel.recipes import recipes, run
from anyaccel.recipes.recipe import Recipe
from anyaccel.upstream.torch_compile_internals import reset_dynamo
from anyaccel.verification.context import describe_error

__all__ = ["CONDITIONS", "FEW", "MODES", "TOLERANCE", "configure_process", "probe_pipeline"]

# How a pipeline is run: as placed without compilation; compiled; compiled with captured graphs; with `speed="fast"`.
MODES = ("eager", "compiled", "captured", "fast")

# Default recipes: one for each of the most common kinds of denoiser.
FEW = ("stable-diffusion", "stable-diffusion-xl", "stable-diffusion-3", "flux", "flux-2-klein", "pixart-alpha")
# Allowed difference in float32, relative to the largest value of the image (at least 1).
TOLERANCE = 1e-3
# Relative change of the weights in `measure_sensitivity`.
_PERTURBATION = 1e-6
# A single perturbation may happen to change little, so the largest change of several counts.
_TRIALS = 4
_SENSITIVITY_FACTOR = 10
# Graphs are captured after two runs per shape, and tiny pipelines have as few as one run per call.
_CALLS_UNTIL_CAPTURED = 3
# Enough steps for `speed="fast"` to reuse denoiser outputs.
_FAST_STEPS = 6
CONDITIONS = (
    "full float32 precision: torch.set_float32_matmul_precision('highest'), and no TF32 in cuDNN",
    "tiny pipelines with random weights, placed by anyaccel in float32, compared with plain diffusers on the CPU",
    "allowed difference: 1e-3 of the image range or, if larger, ten times the difference on the CPU after a relative "
    "change of the weights by 1e-6",
    "compiled: the first image of a compiled pipeline; captured: its fourth image, with captured graphs; fast: "
    "speed='fast' with 6 steps, which must run and give finite values, with its PSNR relative to the exact image",
)


def configure_process(threads: int) -> None:
    """Enable full float32 precision, set the number of CPU threads and silence library warnings."""
    import torch

    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False  # only a flag; works without a GPU
    silence_process()


def probe_pipeline(name: str, device: Any, modes: Sequence[str] = MODES[:1]) -> list[PipelineFinding]:
    """Run a recipe with diffusers on the CPU and with anyaccel on the device, and compare the images.

    There is one finding per mode.
    """
    recipe = recipes()[name]
    try:
        expected = run(recipe, recipe.make())
    except Exception as error:  # noqa: BLE001 - other library versions may lack the classes of a recipe
        text = f"fails on the CPU too: {describe_error(error)}"
        return [_make_finding(recipe, mode=mode, error=text, right=None) for mode in modes]
    findings = [_probe_mode(recipe, device, expected, MODES[0])] if MODES[0] in modes else []
    if set(modes) - set(MODES[:1]):
        findings += _probe_speedups(recipe, device, expected)
    return [finding for finding in findings if finding.mode in modes]


def _probe_mode(recipe: Recipe, device: Any, expected: Any, mode: str, **options: Any) -> PipelineFinding:
    """Place a new pipeline with the options, run it and compare the image."""
    from anyaccel.runtime.pipeline import place

    return _observe(recipe, expected, mode, lambda: place(recipe.make(), device, dtype="float32", **options))[0]


def _probe_speedups(recipe: Recipe, device: Any, expected: Any) -> list[PipelineFinding]:
    """Run one pipeline compiled, then until its graphs are captured, then with `speed="fast"`."""
    from anyaccel.runtime.pipeline import place

    reset_dynamo()  # compiled code of other recipes with the same classes would count as recompilations
    options = {"dtype": "float32", "expected_images": None}
    compiled, pipe = _observe(
        recipe, expected, "compiled", lambda: place(recipe.make(), device, compile=True, **options)
    )
    if pipe is None:
        return [replace(compiled, mode=mode) for mode in MODES[1:]]
    compiled = replace(compiled, fallback=_describe_not_compiled(pipe))
    captured, _ = _observe(recipe, expected, "captured", lambda: pipe, calls=_CALLS_UNTIL_CAPTURED)
    captured = replace(captured, fallback=_describe_not_captured(pipe))
    return [compiled, captured, _probe_fast(recipe, device, pipe)]


def _probe_fast(recipe: Recipe, device: Any, pipe: Any) -> PipelineFinding:
    """Run a pipeline with `speed="fast"`: the image must be finite, and its PSNR is recorded."""
    from anyaccel.generation.image_difference import measure_psnr
    from anyaccel.runtime.pipeline import place

    call = recipe.call
    # A pipeline with an intermediate timestep accepts only two steps.
    has_free_steps = "intermediate_timesteps" not in inspect.signature(type(pipe).__call__).parameters
    if has_free_steps and "num_inference_steps" in call():
        recipe = replace(recipe, call=lambda: call() | {"num_inference_steps": _FAST_STEPS})
    try:
        exact = run(recipe, pipe)
        start = time.perf_counter()
        actual = run(recipe, place(pipe, device, speed="fast", compile=True))
    except Exception as error:  # noqa: BLE001 - any failure is a finding, reported with its message
        return _make_finding(recipe, mode="fast", error=describe_error(error), right=False)
    seconds = round(time.perf_counter() - start, 1)
    if actual.shape != exact.shape or not numpy.isfinite(actual).all():
        error_text = f"the shape is {actual.shape}, expected {exact.shape}, or a value is not finite"
        return _make_finding(recipe, mode="fast", runs=True, error=error_text, right=False)
    psnr = measure_psnr(actual, exact, data_range=max(float(exact.max() - exact.min()), 1e-12))
    skipped = pipe.plan.report.step_skipping
    return _make_finding(
        recipe,
        mode="fast",
        runs=True,
        right=True,
        seconds=seconds,
        fallback="; ".join(filter(None, [str(skipped or "no denoising steps"), _describe_not_compiled(pipe)])),
        psnr_db=None if psnr is None else round(psnr, 1),
    )


def _observe(
    recipe: Recipe, expected: Any, mode: str, make: Callable[[], Any], calls: int = 1
) -> tuple[PipelineFinding, Any]:
    """Run a pipeline `calls` times and compare the last image; return the finding and the pipeline."""
    start = time.perf_counter()
    try:
        pipe = make()
        actual = [run(recipe, pipe) for _ in range(calls)][-1]
    except Exception as error:  # noqa: BLE001 - any failure is a finding, reported with its message
        return _make_finding(recipe, mode=mode, error=describe_error(error), right=False), None
    seconds = round(time.perf_counter() - start, 1)
    if expected.shape != actual.shape:
        text = f"the shape is {actual.shape}, expected {expected.shape}"
        return _make_finding(recipe, mode=mode, runs=True, error=text, right=False), pipe
    difference = float(f"{abs(expected - actual).max():.3g}")
    allowed = TOLERANCE * max(1.0, float(abs(expected).max()))
    if difference > allowed:  # the sensitivity takes four more runs on the CPU, so it is measured only if needed
        allowed = max(allowed, _SENSITIVITY_FACTOR * measure_sensitivity(recipe, expected))
    allowed = float(f"{allowed:.3g}")
    finding = _make_finding(
        recipe,
        mode=mode,
        runs=True,
        max_difference=difference,
        allowed=allowed,
        right=difference <= allowed,
        seconds=seconds,
    )
    return finding, pipe


def _describe_not_compiled(pipe: Any) -> str:
    """Return why models of a placed pipeline run eagerly; empty if all of them run compiled."""
    report = pipe.plan.report
    if report.not_compiled is not None:
        return f"eager: {report.not_compiled.reason}"
    if report.compiled_models is None or not report.compiled_models.value:
        return "the pipeline has no denoiser or decoder to compile"
    return ""


def _describe_not_captured(pipe: Any) -> str:
    """Return why the denoisers of a placed pipeline are not captured; empty if they are."""
    planned, capture = pipe.plan.capture, pipe.plan.report.capture
    if capture is None:
        return f"not captured: {'the pipeline has no denoiser' if planned.value else planned.reason}"
    return "" if capture.value else f"not captured: {capture.reason}"


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
    recipe: Recipe, *, allowed: float = TOLERANCE, runs: bool = False, right: bool | None, **fields: Any
) -> PipelineFinding:
    return PipelineFinding(
        recipe=recipe.name,
        pipeline=recipe.pipeline,
        dtype="float32",
        runs=runs,
        tolerance=allowed,
        right=right,
        **fields,
    )
