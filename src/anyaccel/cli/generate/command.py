"""`anyaccel generate PROMPT…`: images from prompts, with the generation metadata in each file."""

from __future__ import annotations

from typing import Annotated

import typer

from anyaccel.cli.generate.options import Options
from anyaccel.cli.generate.run import GenerateRun
from anyaccel.cli.terminal_image import PROTOCOLS

__all__ = ["run_generate"]

Text = str | None


def run_generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="Description of an image; give several for several images."),
    ] = None,
    model: Annotated[
        Text, typer.Option("--model", "-m", help="Hub id or folder of the model. Default: the embedded model.")
    ] = None,
    device: Annotated[
        Text, typer.Option("--device", "-d", help="Device to use: auto, cuda, hpu:3, virtual:neuron. Default: auto.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", "-s", help="Seed of the first image of each prompt. Default: random.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Number of denoising steps. Default: set by the pipeline.")
    ] = None,
    size: Annotated[
        Text,
        typer.Option(
            "--size",
            metavar="WxH",
            help="Image size in pixels: 640x480, or 512 for a square. Default: set by the model.",
        ),
    ] = None,
    count: Annotated[int, typer.Option("-n", help="Number of images per prompt; each has the next higher seed.")] = 1,
    negative: Annotated[
        Text, typer.Option("--negative", help="Negative prompt: what to avoid in the images. Default: none.")
    ] = None,
    guidance: Annotated[
        float | None,
        typer.Option(
            "--guidance", help="Guidance scale: how closely to follow the prompt. Default: set by the pipeline."
        ),
    ] = None,
    dtype: Annotated[
        Text, typer.Option("--dtype", help="dtype: float32, bf16 or fp16. Default: the preferred dtype of the device.")
    ] = None,
    speed: Annotated[
        Text,
        typer.Option(
            "--speed", help="Speed level: exact, fast or draft; fast and draft change the image. Default: exact."
        ),
    ] = None,
    output: Annotated[
        Text,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH|-",
            help="File (.png, .jpg, .webp), folder/ or - for stdout. Default: the current folder.",
        ),
    ] = None,
    prompts_file: Annotated[
        Text, typer.Option("--prompts", metavar="FILE", help="File with one prompt per line; - reads stdin.")
    ] = None,
    source: Annotated[
        Text,
        typer.Option(
            "--from", metavar="IMAGE", help="Regenerate an image from its metadata; other options override it."
        ),
    ] = None,
    grid: Annotated[bool, typer.Option("--grid", help="Also write a contact sheet of all images.")] = False,
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite existing files.")] = False,
    show: Annotated[
        str, typer.Option("--show", help=f"How to show images in the terminal: {', '.join(PROTOCOLS)}.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Print the placement plan and generate nothing.")] = False,
) -> None:
    """Generate images from prompts.

    Each image file stores the metadata that is needed to generate the image again with --from.
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
