"""`anyaccel bench`: how fast a model is in stock diffusers and in anyaccel, side by side."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

import typer

from anyaccel.call_limits import check_steps, parse_image_size
from anyaccel.cli.interrupts import cleanup_on_exit
from anyaccel.errors import UsageError

__all__ = ["bench_models"]

_AGAINST = {"stock": ("stock eager", "stock compiled"), "eager": ("stock eager",), "nothing": ()}


def bench_models(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="Hub ids, folders, `embedded`.")
    ] = None,
    against: Annotated[
        str, typer.Option("--against", help="stock: eager and compiled; eager: eager alone; nothing.")
    ] = "stock",
    device: Annotated[str, typer.Option("--device", "-d", help="Where to run.")] = "auto",
    dtype: Annotated[str | None, typer.Option("--dtype", help="The type to run all variants in.")] = None,
    size: Annotated[str | None, typer.Option("--size", metavar="WxH", help="In pixels; else the model's own.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Steps of denoising; else the pipeline's own.")] = None,
    pictures: Annotated[
        int, typer.Option("--pictures", help="How many pictures anyaccel is told to expect: compiling depends on it.")
    ] = 1000,
    rounds: Annotated[int, typer.Option("--rounds", help="Pictures that are timed for each variant.")] = 5,
    fast: Annotated[bool, typer.Option("--fast", help='anyaccel with speed="fast" beside it.')] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON, with plans and profiles.")] = False,
) -> None:
    """Make the same picture in stock diffusers, in stock diffusers compiled, and in anyaccel, in turns.

    Each runs in a process of its own; the first pictures, in which things are compiled, are not in the medians.
    Ends with 1 if anyaccel's own failed; a stock one that fails has its cause in the table.
    """
    if against not in _AGAINST:
        raise UsageError(f"--against is one of {', '.join(_AGAINST)}, not {against!r}", hint="leave it out")
    if rounds < 1 or pictures < 1:
        raise UsageError("rounds and pictures are numbers from 1 up", hint="leave them out")
    if steps is not None:
        check_steps(steps, hint="for example --steps 20, or leave it out")
    from anyaccel.backends.device import open_device
    from anyaccel.bench.bench import run_together
    from anyaccel.bench.text import describe_bench

    width, height = parse_image_size(size) if size else (None, None)
    asked: dict[str, Any] = {"width": width, "height": height, "num_inference_steps": steps}
    call = {name: value for name, value in asked.items() if value is not None}
    opened = open_device(device)
    ours = ("anyaccel", *(["anyaccel fast"] if fast else []))
    works = _list_works(models, device, dtype or opened.sheet.default_dtypes.order[0], call, pictures)
    rows: list[dict[str, Any]] = []
    with cleanup_on_exit() as display:
        for work in works:
            one = replace(work, variants=(*_AGAINST[against], *ours))
            rows.extend(run_together([one], rounds=rounds, at_once=False, tell=display.begin))
    if as_json:
        print(json.dumps({"device": opened.driver.device_name(opened.index), "rows": rows}, indent=2))
    else:
        print("\n".join(describe_bench(rows)))
    if any("error" in row or "error" in row["variants"][name] for row in rows for name in ours):
        raise typer.Exit(1)


def _list_works(models: list[str] | None, device: str, dtype: str, call: dict[str, Any], pictures: int) -> list[Any]:
    """The models as works; one that is not there is refused before any is run."""
    from anyaccel.backends.device_functions import dtype_name
    from anyaccel.bench.case import BenchCase
    from anyaccel.embedded.model import CALL_DEFAULTS, NAME
    from anyaccel.generation.model_name import resolve_model

    told, type_name = {"expected_images": pictures}, dtype_name(dtype)
    named = {model: resolve_model(model) for model in models or [NAME]}
    return [
        BenchCase(
            model=one.source, title=model, device=device, dtype=type_name, options=told,
            call={**(CALL_DEFAULTS if one.kind == "embedded" else {}), **call},
        )
        for model, one in named.items()
    ]  # fmt: skip
