"""`anyaccel generate PROMPT…`: pictures from prompts, each in a file that says how it was made."""

from __future__ import annotations

from typing import Annotated

import typer

from anyaccel.cli.generate.options import Options
from anyaccel.cli.generate.run import GenerateRun
from anyaccel.cli.terminal_image import WAYS

__all__ = ["generate_pictures"]

Text = str | None


def generate_pictures(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="What each picture shows.")] = None,
    model: Annotated[Text, typer.Option("--model", "-m", help="A hub id or a folder; else the embedded one.")] = None,
    device: Annotated[Text, typer.Option("--device", "-d", help="auto, a name, hpu:3, virtual:neuron.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", "-s", help="One seed, one picture; else a random one.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="How many steps a picture takes.")] = None,
    size: Annotated[
        Text, typer.Option("--size", metavar="WxH", help="In pixels: 640x480, or 512 for a square.")
    ] = None,
    count: Annotated[int, typer.Option("-n", help="Pictures of each prompt; the seed goes up by one.")] = 1,
    negative: Annotated[Text, typer.Option("--negative", help="What the pictures shall not show.")] = None,
    guidance: Annotated[float | None, typer.Option("--guidance", help="How closely to follow the prompt.")] = None,
    dtype: Annotated[Text, typer.Option("--dtype", help="float32, bf16, fp16; else the device's best.")] = None,
    speed: Annotated[Text, typer.Option("--speed", help="exact; fast and draft are not quite the same.")] = None,
    output: Annotated[
        Text, typer.Option("--output", "-o", metavar="PATH|-", help="A file (png, jpg, webp), a folder/, or stdout.")
    ] = None,
    prompts_file: Annotated[
        Text, typer.Option("--prompts", metavar="FILE", help="A prompt a line; - is stdin.")
    ] = None,
    source: Annotated[Text, typer.Option("--from", metavar="PICTURE", help="Make this picture again.")] = None,
    grid: Annotated[bool, typer.Option("--grid", help="Write a contact sheet besides.")] = False,
    force: Annotated[bool, typer.Option("--force", "-f", help="Write over files that are there.")] = False,
    show: Annotated[str, typer.Option("--show", help=f"In the terminal: {', '.join(WAYS)}.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Print the plan with its reasons; no picture.")] = False,
) -> None:
    """Make pictures from prompts, with the model that comes along, a folder's or the hub's.

    The file of each picture holds its whole recipe. --from makes it again, with whatever else is given changed.
    """
    GenerateRun(
        Options(
            prompts=prompts or (),
            prompts_file=prompts_file,
            source=source,
            model=model,
            device=device,
            seed=seed,
            steps=steps,
            size=size,
            count=count,
            negative=negative,
            guidance=guidance,
            dtype=dtype,
            speed=speed,
            output=output,
            grid=grid,
            force=force,
            show=show,
            as_json=as_json,
            explain=explain,
        )
    ).run()
