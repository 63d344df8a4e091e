"""`anyaccel check MODEL --real`: your model on your device against the CPU, by component and by step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from anyaccel.backends.device import find_device, open_device, read_device
from anyaccel.checking.call_recording import Comparison, comparing, recording
from anyaccel.checking.target import read_target
from anyaccel.errors import AnyaccelError
from anyaccel.generation.image_difference import measure_difference, measure_psnr
from anyaccel.recipes.recipe import Recipe, run
from anyaccel.runtime.pipeline import place

__all__ = ["ComponentResult", "HardwareReport", "check_on_hardware", "describe_hardware_report"]

_ALLOWED = {"float64": 1e-3, "float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""How far a model may be from the CPU's in float32, relative to the norm of what it gives, by the type it runs in."""


@dataclass(frozen=True, kw_only=True)
class ComponentResult:
    """One model of the pipeline."""

    name: str
    calls: int
    alone: float | None
    """The largest relative error of a call with the CPU's inputs; None where none could be compared."""
    along: tuple[float | None, ...]
    """The relative error of each call in the device's own run."""
    finite: bool
    wrong: bool


@dataclass(frozen=True, kw_only=True)
class HardwareReport:
    """What a model does on a device, beside the CPU."""

    subject: str
    pipeline: str
    device: str
    virtual: bool
    dtype: str
    allowed: float
    parts: tuple[ComponentResult, ...]
    max_difference: float | None
    psnr_db: float | None
    """Of the picture against the CPU's; None where it is equal to the last bit."""

    @property
    def right(self) -> bool:
        """Whether no model is wrong by itself, and everything is finite."""
        return self.max_difference is not None and not any(part.wrong for part in self.parts)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"right": self.right}

    def to_json(self) -> str:
        """The whole report."""
        return json.dumps(self.as_dict(), indent=2)


def check_on_hardware(
    what: Any,
    device: str = "auto",
    *,
    dtype: str | None = None,
    say: Callable[[str], None] = lambda _: None,
    **call: Any,
) -> HardwareReport:
    """Run a model with its own weights on the CPU in float32, then on a device; compare every call of its parts.

    A hub id, a folder, the embedded model's name, a recipe, `package.module:function` or a pipeline. Every further
    keyword goes to the pipeline's call.
    """
    spec = read_device(device)
    if not spec.virtual:
        chosen_device = open_device(spec)  # before minutes are spent on the CPU
        if chosen_device.sheet.is_host:
            say("note: no accelerator is asked for or here; this compares the CPU with itself")
    name, recipe = _open(what, call)
    pipe: Any = recipe.make()
    say("on the CPU, in float32")
    place(pipe, "cpu", dtype="float32")
    with recording(pipe) as calls:
        expected = run(recipe, pipe)
    say(f"on {device}")
    place(pipe, device, **({"dtype": dtype} if dtype else {}))
    chosen = str(pipe.plan.dtype.value)
    with comparing(pipe, calls) as found:
        seen = _run_to_the_end(recipe, pipe)
    found_device = find_device(pipe.plan.device)
    difference = None if seen is None else measure_difference(seen, expected)
    return HardwareReport(
        subject=name,
        pipeline=recipe.pipeline,
        device=found_device.name,
        virtual=found_device.virtual,
        dtype=chosen,
        allowed=_ALLOWED.get(chosen, 1e-1),
        parts=tuple(_sum_up(found, _ALLOWED.get(chosen, 1e-1))),
        max_difference=difference,
        psnr_db=None if seen is None or not difference else _psnr(expected, seen),
    )


def _open(what: Any, call: dict[str, Any]) -> tuple[str, Recipe]:
    """A model with its own weights, where it has some, and a call of it."""
    from anyaccel.generation.model_name import resolve_model
    from anyaccel.recipes import recipes

    if isinstance(what, str) and what not in recipes() and ":" not in what:
        from anyaccel.runtime.pipeline import DiffusionPipeline

        named = resolve_model(what)
        subject = read_target(DiffusionPipeline.from_pretrained(named.source), call)
        return named.name, subject.recipe
    subject = read_target(what, call)
    return subject.name, subject.recipe


def _run_to_the_end(recipe: Recipe, pipe: Any) -> Any:
    """The picture, or None where it is not finite."""
    try:
        return run(recipe, pipe)
    except AnyaccelError:
        return None


def _psnr(expected: Any, seen: Any) -> float | None:
    """Against the range of the CPU's picture."""
    found = measure_psnr(seen, expected, reach=max(float(expected.max() - expected.min()), 1e-12))
    return None if found is None else round(found, 1)


def _sum_up(found: list[Comparison], allowed: float) -> Iterator[ComponentResult]:
    for name in dict.fromkeys(one.name for one in found):
        calls = [one for one in found if one.name == name]
        errors = [one.alone for one in calls if one.alone is not None]
        alone = max(errors, default=None)
        finite = all(one.finite for one in calls)
        wrong = not finite or (alone is not None and not alone <= allowed)  # not a number is wrong too
        yield ComponentResult(
            name=name,
            calls=len(calls),
            alone=alone,
            along=tuple(one.along for one in calls),
            finite=finite,
            wrong=wrong,
        )


def describe_hardware_report(report: HardwareReport) -> Iterator[str]:
    """The answer, and where it comes from."""
    kind = "virtual" if report.virtual else "hardware"
    answer = "right" if report.right else "silently wrong"
    yield f"{report.subject} ({report.pipeline}) on {report.device} ({kind}), {report.dtype}: {answer}"
    yield f"  {'model':24}{'calls':>6}{'error by itself':>18}{'allowed':>10}{'added up':>12}"
    for part in report.parts:
        alone = "not comparable" if part.alone is None else f"{part.alone:.1e}"
        last = "" if part.along[-1] is None else f"{part.along[-1]:.1e}"
        mark = "" if not part.wrong else "   WRONG" if part.finite else "   NOT FINITE"
        yield f"  {part.name:24}{part.calls:6}{alone:>18}{report.allowed:10.0e}{last:>12}{mark}"
        if part.calls > 1:
            yield "    by call: " + " ".join("?" if one is None else f"{one:.0e}" for one in part.along)
    if report.max_difference is None:
        yield "  the picture is not finite, or has another size"
    elif report.psnr_db is None:
        yield "  the picture is the CPU's to the last bit"
    else:
        yield f"  the picture differs from the CPU's by {report.max_difference:.1e} at most, {report.psnr_db} dB"
    wrong = next((part for part in report.parts if part.wrong), None)
    if wrong is not None:
        yield f"  {wrong.name} is the first that is wrong with the CPU's own inputs: run it in float32, or report it"
