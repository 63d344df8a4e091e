"""Command-line options shared by several commands."""

from __future__ import annotations

from typing import Annotated

import typer

from anyaccel.cli.completion import complete_device, complete_dtype, complete_speed, complete_weights
from anyaccel.planning.options import WEIGHT_FORMATS

__all__ = ["AsJson", "Device", "Dtype", "ImageSize", "Model", "RayAddress", "Speed", "Steps", "Text", "Weights"]

Text = str | None
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        "-d",
        help="Device to use: auto, cuda, hpu:3, virtual:neuron.",
        autocompletion=complete_device,
    ),
]
Dtype = Annotated[
    Text,
    typer.Option(
        "--dtype",
        help="dtype of weights and computation: float32, bfloat16 or float16. Default: the device's preferred dtype.",
        autocompletion=complete_dtype,
    ),
]
ImageSize = Annotated[
    Text,
    typer.Option(
        "--size", metavar="WxH", help="Image size in pixels: 640x480, or 512 for a square. Default: set by the model."
    ),
]
Model = Annotated[
    Text, typer.Option("--model", "-m", help="Hub ID or folder of the model. Default: the embedded model.")
]
RayAddress = Annotated[
    Text,
    typer.Option(
        "--ray", metavar="ADDRESS|auto", help="Run the workers on this Ray cluster. Default: on this machine."
    ),
]
Speed = Annotated[
    str,
    typer.Option(
        "--speed",
        help="Speed level: exact, fast or draft; fast and draft change the image.",
        autocompletion=complete_speed,
    ),
]
Steps = Annotated[int | None, typer.Option("--steps", help="Number of denoising steps. Default: set by the pipeline.")]
Weights = Annotated[
    Text,
    typer.Option(
        "--weights",
        metavar="FORMAT",
        help=f"Quantize large models, which changes the image: {', '.join(WEIGHT_FORMATS)}. Default: no quantization.",
        autocompletion=complete_weights,
    ),
]
