"""`anyaccel explain`: memory forecast and placement plan for a model, without its weights."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Annotated

import typer

from anyaccel.call_limits import check_batch, check_frames, parse_image_size
from anyaccel.cli.completion import complete_device, complete_memory
from anyaccel.cli.progress import Display
from anyaccel.cli.shared_options import AsJson, Dtype, ImageSize, Steps, Weights
from anyaccel.processes.gc_control import gc_paused, ignore_existing_objects

if TYPE_CHECKING:
    from anyaccel.planning.plan import Plan

__all__ = ["explain_model"]


ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="Hub ID, folder or `embedded`.")]
DeviceOrProduct = Annotated[
    str,
    typer.Option(
        "--device",
        "-d",
        help="Device or product, optionally with a memory size: cuda, rtx4090, mps:16GiB.",
        autocompletion=complete_device,
    ),
]
SmallestDtype = Annotated[
    str | None,
    typer.Option(
        "--smallest-dtype", help="Smallest dtype to fall back to if the model does not fit. Default: no fallback."
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        help="Memory mode: resident, component, layer or phase. Default: automatic.",
        autocompletion=complete_memory,
    ),
]
Parallel = Annotated[
    str | None,
    typer.Option(
        "--parallel",
        help="How to split the model across devices: auto, tensor:2, context:4 or cfg. Default: one device.",
    ),
]
Frames = Annotated[
    int | None,
    typer.Option("--frames", help="Number of frames of a video. Default: set by the model."),
]
Fps = Annotated[float | None, typer.Option("--fps", help="Frames per second of a video. Default: set by the model.")]
Seconds = Annotated[
    float | None,
    typer.Option("--seconds", help="Duration of audio, or of a video instead of --frames. Default: set by the model."),
]
Revision = Annotated[
    str | None, typer.Option("--revision", help="Commit, branch or tag of a hub model. Default: main.")
]


def explain_model(
    model: ModelName,
    device: DeviceOrProduct = "auto",
    size: ImageSize = None,
    frames: Frames = None,
    fps: Fps = None,
    seconds: Seconds = None,
    steps: Steps = None,
    batch: Annotated[int, typer.Option("--batch", "-n", help="Number of images per call.")] = 1,
    dtype: Dtype = None,
    smallest_dtype: SmallestDtype = None,
    memory: Memory = None,
    parallel: Parallel = None,
    weights: Weights = None,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Report whether a model fits on a device and how it would run.

    Only config files are read; neither the weights nor the device is required. Those of a Hub model are downloaded.
    The exit status is 1 if the model does not fit.
    """
    width, height = (None, None) if size is None else parse_image_size(size)
    _check_counts(batch, frames)
    display = Display()
    display.start_phase(f"Explaining {model}")
    try:
        with gc_paused():  # garbage collection takes a fifth of the import time
            from anyaccel.upstream.quick_imports import import_for_tracing

            import_for_tracing()
            from anyaccel.embedded.motion import choose_name
            from anyaccel.explanation.explain import explain
            from anyaccel.explanation.model_configs import find_model

            model = str(choose_name(model, {"frames": frames, "fps": fps, "seconds": seconds}))
            plan = explain(
                model, device,
                width=width, height=height, frames=frames, fps=fps, seconds=seconds, steps=steps, batch=batch,
                dtype=dtype, smallest_dtype=smallest_dtype, revision=revision, memory=memory, parallel=parallel,
                weights=weights, listener=display,
            )  # fmt: skip
            assert plan.forecast is not None  # only plans of placed pipelines have none
            download_bytes = find_model(model, revision).missing_bytes(name for name, _ in plan.forecast.components)
    finally:
        display.clear()
    _print_explanation(plan, model, download_bytes, as_json=as_json)
    ignore_existing_objects()  # skips the last garbage collection, at exit
    if not plan.forecast.fits:
        raise typer.Exit(1)


def _check_counts(batch: int, frames: int | None) -> None:
    check_batch(batch, hint="for example --batch 1")
    if frames is not None:
        check_frames(frames, hint="for example --frames 16")


def _print_explanation(plan: Plan, model: str, download_bytes: int | None, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"model": model, **plan.to_dict(), "download_bytes": download_bytes}, indent=2))
        return
    from anyaccel.explanation.text import describe_explanation

    columns = shutil.get_terminal_size((100, 24)).columns
    print("\n".join(describe_explanation(plan, model, columns, download_bytes=download_bytes)))
