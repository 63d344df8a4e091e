"""`anyaccel check MODEL --real`: compares every model call on a device with the same call on the CPU."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from anyaccel.backends.device import find_device, open_device, read_device
from anyaccel.checking.model_call_comparison import Comparison, comparing, recording
from anyaccel.checking.target import CheckTarget, quantize_target, read_target
from anyaccel.errors import AnyaccelError
from anyaccel.generation.image_difference import measure_difference, measure_psnr
from anyaccel.planning.options import check_weights
from anyaccel.recipes.recipe import Recipe, run
from anyaccel.runtime.pipeline import place

__all__ = ["ComponentResult", "HardwareReport", "check_on_hardware", "describe_hardware_report"]

# Allowed relative error (of the norm) of a model's output against the CPU in float32, by dtype on the device.
_TOLERANCES = {"float64": 1e-3, "float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
_DEFAULT_TOLERANCE = 1e-1


@dataclass(frozen=True, kw_only=True)
class ComponentResult:
    """Comparison result for one model in the pipeline."""

    name: str
    calls: int
    isolated_error: float | None
    """Largest relative error of a call that gets the CPU's inputs; None if no call could be compared."""
    accumulated_error: tuple[float | None, ...]
    """Relative error of each call in the device's own run, where errors of earlier calls add up."""
    finite: bool
    wrong: bool


@dataclass(frozen=True, kw_only=True)
class HardwareReport:
    """Results for a model on a device, compared with the CPU."""

    target: str
    pipeline: str
    device: str
    virtual: bool
    dtype: str
    weights: str | None
    """Format to which the weights were quantized, also for the run on the CPU."""
    tolerance: float
    components: tuple[ComponentResult, ...]
    max_difference: float | None
    psnr_db: float | None
    """PSNR of the image against the CPU's; None if they are bitwise identical."""

    @property
    def right(self) -> bool:
        """Whether every model matches the CPU within the tolerance and all outputs are finite."""
        return self.max_difference is not None and not any(component.wrong for component in self.components)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a JSON-serializable dict."""
        # The keys are the format of `--json` and differ from the attribute names.
        keys = {"target": "subject", "tolerance": "allowed", "components": "parts"}
        component_keys = {"isolated_error": "alone", "accumulated_error": "along"}
        document = {keys.get(name, name): value for name, value in asdict(self).items()}
        document["parts"] = [
            {component_keys.get(name, name): value for name, value in component.items()}
            for component in document["parts"]
        ]
        return document | {"right": self.right}

    def to_json(self) -> str:
        """Return the report as a JSON string."""
        return json.dumps(self.as_dict(), indent=2)


def check_on_hardware(
    target: Any,
    device: str = "auto",
    *,
    dtype: str | None = None,
    weights: str | None = None,
    on_message: Callable[[str], None] = lambda _: None,
    **call: Any,
) -> HardwareReport:
    """Run a model on the CPU in float32 and on a device, and compare the output of every model call.

    `target` is a Hub ID, a folder, `embedded`, a recipe name, `package.module:function` or a pipeline.
    A Hub model or folder is loaded with its own weights. Additional keyword arguments are passed to the
    pipeline call. `weights` quantizes the pipeline before both runs. `on_message` is called with progress messages.
    """
    spec = read_device(device)
    # Opening the device first raises for a missing one now, not after minutes on the CPU.
    if not spec.virtual and open_device(spec).sheet.is_host:
        on_message("note: no accelerator is selected or available; this compares the CPU with itself")
    check_weights(weights)
    found = quantize_target(_load_target(target, call), weights)
    name, recipe = found.name, found.recipe
    recipe = replace(recipe, call=functools.partial(_call_with_seed, recipe.call))
    pipe: Any = recipe.make()
    on_message("running on the CPU in float32")
    place(pipe, "cpu", dtype="float32")
    # The same pipeline object runs on both devices, with the same weights.
    with recording(pipe) as calls:
        expected = run(recipe, pipe)
    on_message(f"running on {device}")
    # Without `dtype`, the plan chooses it, as it would for the user.
    place(pipe, device, **({"dtype": dtype} if dtype else {}))
    device_dtype = str(pipe.plan.dtype.value)
    with comparing(pipe, calls) as comparisons:
        actual = _run_or_none(recipe, pipe)
    plan_device = find_device(pipe.plan.device)
    difference = None if actual is None else measure_difference(actual, expected)
    tolerance = _TOLERANCES.get(device_dtype, _DEFAULT_TOLERANCE)
    return HardwareReport(
        target=name,
        pipeline=recipe.pipeline,
        device=plan_device.name,
        virtual=plan_device.virtual,
        dtype=device_dtype,
        weights=weights,
        tolerance=tolerance,
        components=tuple(_summarize(comparisons, tolerance)),
        max_difference=difference,
        psnr_db=None if actual is None or not difference else _measure_psnr(expected, actual),
    )


def _call_with_seed(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the call arguments with `seed` instead of a `torch.Generator`.

    From the same generator, torch draws different values in float32 and in half precision on x86_64 CPUs. With
    `seed`, anyaccel always draws in float32.
    """
    import torch

    arguments = call()
    if isinstance(arguments.get("generator"), torch.Generator):
        arguments["seed"] = arguments.pop("generator").initial_seed()
    return arguments


def _load_target(target: Any, call: dict[str, Any]) -> CheckTarget:
    """Return a target with a recipe that builds its pipeline.

    A Hub model or folder is loaded with its own weights; a named recipe has random weights.
    """
    from anyaccel.generation.model_name import resolve_model
    from anyaccel.recipes import recipes

    if isinstance(target, str) and target not in recipes() and ":" not in target:
        # Without this, `read_target` would build a small model with random weights from the configs.
        from anyaccel.runtime.pipeline import DiffusionPipeline

        model = resolve_model(target)
        return replace(read_target(DiffusionPipeline.from_pretrained(model.source), call), name=model.name)
    return read_target(target, call)


def _run_or_none(recipe: Recipe, pipe: Any) -> Any:
    """Run the pipeline and return the image, or None if it contains NaN or Inf."""
    try:
        return run(recipe, pipe)
    except AnyaccelError:
        return None


def _measure_psnr(expected: Any, actual: Any) -> float | None:
    """Return the PSNR in dB, relative to the value range of the CPU image."""
    psnr = measure_psnr(actual, expected, data_range=max(float(expected.max() - expected.min()), 1e-12))
    return None if psnr is None else round(psnr, 1)


def _summarize(comparisons: list[Comparison], tolerance: float) -> Iterator[ComponentResult]:
    for name in dict.fromkeys(comparison.name for comparison in comparisons):
        calls = [comparison for comparison in comparisons if comparison.name == name]
        errors = [call.isolated_error for call in calls if call.isolated_error is not None]
        isolated_error = max(errors, default=None)
        finite = all(call.finite for call in calls)
        # `not <=` instead of `>`, so that NaN counts as wrong.
        wrong = not finite or (isolated_error is not None and not isolated_error <= tolerance)
        yield ComponentResult(
            name=name,
            calls=len(calls),
            isolated_error=isolated_error,
            accumulated_error=tuple(call.accumulated_error for call in calls),
            finite=finite,
            wrong=wrong,
        )


def describe_hardware_report(report: HardwareReport) -> Iterator[str]:
    """Yield the report as lines of text: a verdict, a row per component and the first wrong component."""
    kind = "virtual" if report.virtual else "hardware"
    verdict = "right" if report.right else "silently wrong"
    precision = report.dtype if report.weights is None else f"{report.dtype}, weights in {report.weights}"
    yield f"{report.target} ({report.pipeline}) on {report.device} ({kind}), {precision}: {verdict}"
    yield f"  {'component':24}{'calls':>6}{'isolated error':>18}{'allowed':>10}{'accumulated':>13}"
    for component in report.components:
        isolated = "not comparable" if component.isolated_error is None else f"{component.isolated_error:.1e}"
        last = "" if component.accumulated_error[-1] is None else f"{component.accumulated_error[-1]:.1e}"
        mark = "" if not component.wrong else "   WRONG" if component.finite else "   NOT FINITE"
        yield f"  {component.name:24}{component.calls:6}{isolated:>18}{report.tolerance:10.0e}{last:>13}{mark}"
        if component.calls > 1:
            errors = ("?" if error is None else f"{error:.0e}" for error in component.accumulated_error)
            yield "    accumulated by call: " + " ".join(errors)
    if report.max_difference is None:
        yield "  the image contains NaN or Inf, or has a different size"
    elif report.psnr_db is None:
        yield "  the image is bitwise identical to the CPU's"
    else:
        yield f"  the image differs from the CPU's by at most {report.max_difference:.1e} (PSNR {report.psnr_db} dB)"
    wrong = next((component for component in report.components if component.wrong), None)
    if wrong is not None:
        yield f"  {wrong.name} is the first component that is wrong on the CPU's inputs: run it in float32 or report it"
