"""`anyaccel bench`: speed comparison of stock diffusers and anyaccel on the same model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anyaccel.call_limits import check_steps, parse_image_size
from anyaccel.cli.interrupts import cleanup_on_exit
from anyaccel.cli.shared_options import Device, Dtype, ImageSize, Steps, Weights
from anyaccel.errors import UsageError
from anyaccel.planning.options import check_weights
from anyaccel.runtime.durations import check_duration

if TYPE_CHECKING:
    from anyaccel.bench.case import BenchCase

__all__ = ["bench_models"]

# Stock variants to measure for each value of `--against`.
_BASELINES = {"stock": ("stock eager", "stock compiled"), "eager": ("stock eager",), "nothing": ()}

Models = Annotated[
    list[str] | None,
    typer.Argument(metavar="MODEL", help="Hub IDs, folders or `embedded`. Default: the embedded model."),
]
Against = Annotated[
    str,
    typer.Option(
        "--against", help="Baseline to compare with: stock (eager and compiled), eager (eager only) or nothing."
    ),
]
Images = Annotated[
    int,
    typer.Option(
        "--images", help="Expected number of images (expected_images); determines whether models are compiled."
    ),
]


def bench_models(
    models: Models = None,
    against: Against = "stock",
    device: Device = "auto",
    dtype: Dtype = None,
    weights: Weights = None,
    size: ImageSize = None,
    steps: Steps = None,
    frames: Annotated[int | None, typer.Option("--frames", help="Number of frames of a video.")] = None,
    seconds: Annotated[float | None, typer.Option("--seconds", help="Length of a video or audio.")] = None,
    fps: Annotated[float | None, typer.Option("--fps", help="Frames per second of a video.")] = None,
    images: Images = 1000,
    rounds: Annotated[int, typer.Option("--rounds", help="Number of timed images per variant.")] = 5,
    fast: Annotated[bool, typer.Option("--fast", help='Also measure anyaccel with speed="fast".')] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, including plans and profiles.")] = False,
) -> None:
    """Benchmark anyaccel against stock diffusers.

    Stock diffusers, compiled stock diffusers and anyaccel take turns generating the same image, video or audio, each
    in its own process. Warm-up images, which include compilation, are excluded from the medians. A pipeline that
    requires an input image gets a color gradient. The exit status is 1 if an anyaccel variant fails; a failed stock
    variant is only shown in the table.
    """
    lengths = {"frames": frames, "seconds": seconds, "fps": fps}
    _check_options(against, rounds, images, steps, weights, lengths)
    # Imports torch, which takes seconds, so check the options first.
    from anyaccel.backends.device import open_device
    from anyaccel.bench.bench import run_together
    from anyaccel.bench.text import format_bench

    width, height = parse_image_size(size) if size else (None, None)
    arguments: dict[str, Any] = {"width": width, "height": height, "num_inference_steps": steps, **lengths}
    call = {name: value for name, value in arguments.items() if value is not None}
    opened = open_device(device)
    ours = ("anyaccel", *(["anyaccel fast"] if fast else []))
    options: dict[str, Any] = {"expected_images": images} | ({} if weights is None else {"weights": weights})
    cases = _make_cases(models, device, dtype or opened.sheet.default_dtypes.order[0], call, options)
    rows: list[dict[str, Any]] = []
    with cleanup_on_exit() as display:
        # One model at a time: concurrent processes would compete for the device and distort the timings.
        for case in cases:
            case_with_variants = replace(case, variants=(*_BASELINES[against], *ours))
            rows.extend(
                run_together(
                    [case_with_variants], rounds=rounds, concurrent_warmup=False, on_progress=display.start_phase
                )
            )
    if as_json:
        print(json.dumps({"device": opened.driver.device_name(opened.index), "rows": rows}, indent=2))
    else:
        print("\n".join(format_bench(rows)))
    if any("error" in row or "error" in row["variants"][name] for row in rows for name in ours):
        raise typer.Exit(1)


def _check_options(
    against: str, rounds: int, images: int, steps: int | None, weights: str | None, lengths: Mapping[str, float | None]
) -> None:
    """Raise UsageError if an option is out of range."""
    if against not in _BASELINES:
        raise UsageError(
            f"unknown value {against!r} for --against", hint=f"use one of {', '.join(_BASELINES)}, or omit the option"
        )
    for option, value in (("--rounds", rounds), ("--images", images)):
        if value < 1:
            raise UsageError(f"{option} must be at least 1, not {value}", hint=f"omit {option} to use the default")
    if steps is not None:
        check_steps(steps, hint="for example --steps 20; omit the option to use the default of the pipeline")
    for name, length in lengths.items():
        if length is not None:
            check_duration(name, length)
    check_weights(weights)


def _make_cases(
    models: list[str] | None, device: str, dtype: str, call: dict[str, Any], options: dict[str, Any]
) -> list[BenchCase]:
    """Return one benchmark case per model, or one for the embedded model if no model is given."""
    from anyaccel.backends.device_functions import dtype_name
    from anyaccel.bench.case import BenchCase
    from anyaccel.embedded.model import CALL_DEFAULTS, NAME
    from anyaccel.embedded.motion import choose_name, fit_video_call
    from anyaccel.generation.model_name import resolve_model

    full_dtype = dtype_name(dtype)
    # All names are resolved first: a mistake in the last one must not surface after the others have run.
    resolved = {name: resolve_model(choose_name(name, call)) for name in models or [NAME]}
    return [
        BenchCase(
            model=model.source, title=name, device=device, dtype=full_dtype, options=options,
            call={
                **(CALL_DEFAULTS if model.kind == "embedded" else {}),
                **(fit_video_call(call) if model.with_motion else call),
            },
        )
        for name, model in resolved.items()
    ]  # fmt: skip
