"""`anyaccel explain`: will it fit, how and why this way, before a byte of weights is downloaded."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Annotated

import typer

from anyaccel.call_limits import check_batch, parse_image_size
from anyaccel.cli.progress import Display
from anyaccel.processes.gc_control import gc_paused, ignore_existing_objects

if TYPE_CHECKING:
    from anyaccel.planning.plan import Plan

__all__ = ["explain_model"]


def explain_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A hub id, a folder, or `embedded`.")],
    device: Annotated[
        str,
        typer.Option("--device", "-d", help="A device, a product, or a device with so much memory: gaudi2, mps:16GiB."),
    ] = "auto",
    size: Annotated[
        str | None,
        typer.Option("--size", metavar="WxH", help="In pixels: 640x480, or 512 for a square; else the model's own."),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", "-n", help="How many images at once.")] = 1,
    dtype: Annotated[str | None, typer.Option("--dtype", help="The type to run in; else the device's best.")] = None,
    smallest_dtype: Annotated[
        str | None, typer.Option("--smallest-dtype", help="The type to fall back to where nothing else fits.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="Pin where weights are: resident, component, layer, phase.")
    ] = None,
    parallel: Annotated[
        str | None, typer.Option("--parallel", help="One model over several devices: auto, tensor:2, context:4, cfg.")
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Of a hub's model.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
) -> None:
    """Say whether a model fits on a device and how it would be run, without its weights and without the device.

    Config files alone are read; of a hub's model only those are fetched. Exit status 1 where it cannot fit at all.
    """
    width, height = (None, None) if size is None else parse_image_size(size)
    check_batch(batch, hint="--batch 1")
    display = Display()
    display.begin(f"explaining {model}")
    try:
        with gc_paused():
            from anyaccel.explanation.explain import explain
            from anyaccel.explanation.model_configs import find_model

            asked = {"dtype": dtype, "smallest_dtype": smallest_dtype, "memory": memory, "parallel": parallel}
            plan = explain(model, device, width=width, height=height, batch=batch, revision=revision, **asked)
            assert plan.forecast is not None
            missing = find_model(model, revision).missing_bytes(name for name, _ in plan.forecast.components)
    finally:
        display.clear()
    if as_json:
        print(json.dumps({"model": model, **plan.to_dict(), "download_bytes": missing}, indent=2))
    else:
        _show(plan, model, missing)
    ignore_existing_objects()  # else the interpreter collects once more before it exits
    if not plan.forecast.fits:
        raise typer.Exit(1)


def _show(plan: Plan, model: str, missing: int | None) -> None:
    from anyaccel.explanation.text import describe_explanation

    columns = shutil.get_terminal_size((100, 24)).columns
    print("\n".join(describe_explanation(plan, model, columns, download_bytes=missing)))
