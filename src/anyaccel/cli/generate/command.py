"""`anyaccel generate PROMPT…`: generates images from prompts and stores the metadata in each file."""

from __future__ import annotations

from typing import Annotated

import typer

from anyaccel.cli.generate.options import Options
from anyaccel.cli.generate.runner import GenerateRun
from anyaccel.cli.shared_options import AsJson, Dtype, ImageSize, Model, Steps, Text, Weights
from anyaccel.cli.terminal_image import PROTOCOLS

__all__ = ["run_generate"]

# Each argument is a prompt, so unquoted words give one image each; GenerateRun then prints a note.
Prompts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PROMPT", help="Text that describes the image; pass several to generate one image for each."
    ),
]
# These options default to None, unlike in other commands: with --from, None means the value from the metadata of the
# image.
OptionalDevice = Annotated[
    Text, typer.Option("--device", "-d", help="Device to use: auto, cuda, hpu:3, virtual:neuron. Default: auto.")
]
OptionalSpeed = Annotated[
    Text,
    typer.Option("--speed", help="Speed level: exact, fast or draft; fast and draft change the image. Default: exact."),
]
Seed = Annotated[
    int | None, typer.Option("--seed", "-s", help="Seed of the first image of each prompt. Default: random.")
]
Count = Annotated[int, typer.Option("-n", help="Number of images per prompt, with consecutive seeds.")]
Negative = Annotated[
    Text, typer.Option("--negative", help="Negative prompt: what to avoid in the images. Default: none.")
]
Guidance = Annotated[
    float | None,
    typer.Option("--guidance", help="Guidance scale: how closely to follow the prompt. Default: set by the pipeline."),
]
Output = Annotated[
    Text,
    typer.Option(
        "--output",
        "-o",
        metavar="PATH|-",
        help="File (.png, .jpg, .webp), folder/ or - for stdout. Default: the current folder.",
    ),
]
PromptsFile = Annotated[
    Text, typer.Option("--prompts", metavar="FILE", help="File with one prompt per line; - reads stdin.")
]
Source = Annotated[
    Text,
    typer.Option("--from", metavar="IMAGE", help="Regenerate an image from its metadata; other options override it."),
]
Show = Annotated[str, typer.Option("--show", help=f"How to show images in the terminal: {', '.join(PROTOCOLS)}.")]
Explain = Annotated[bool, typer.Option("--explain", help="Print the placement plan without generating images.")]


def run_generate(
    prompts: Prompts = None,
    model: Model = None,
    device: OptionalDevice = None,
    seed: Seed = None,
    steps: Steps = None,
    size: ImageSize = None,
    count: Count = 1,
    negative: Negative = None,
    guidance: Guidance = None,
    dtype: Dtype = None,
    speed: OptionalSpeed = None,
    weights: Weights = None,
    output: Output = None,
    prompts_file: PromptsFile = None,
    source: Source = None,
    grid: Annotated[bool, typer.Option("--grid", help="Also write a contact sheet of all images.")] = False,
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite existing files.")] = False,
    show: Show = "auto",
    as_json: AsJson = False,
    explain: Explain = False,
) -> None:
    """Generate images from prompts.

    Each image file contains the metadata needed to regenerate it with --from.
    """
    # Ranges are checked by GenerateRun and not by typer, which prints errors without a hint.
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
            weights=weights,
            output=output,
            grid=grid,
            force=force,
            show=show,
            as_json=as_json,
            explain=explain,
        )
    ).run()
