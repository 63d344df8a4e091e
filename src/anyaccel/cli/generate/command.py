"""`anyaccel generate PROMPT…`: generates images, videos and audio, and stores the metadata in each file."""

from __future__ import annotations

from typing import Annotated

import typer

from anyaccel.cli.completion import complete_device, complete_dtype, complete_speed, complete_weights
from anyaccel.cli.generate.options import Options
from anyaccel.cli.generate.runner import GenerateRun
from anyaccel.cli.shared_options import Text
from anyaccel.cli.terminal_image import PROTOCOLS
from anyaccel.planning.options import WEIGHT_FORMATS

__all__ = ["run_generate"]

# Sections of the help text.
_INPUT, _MODEL, _CALL, _OUTPUT = "Input", "Model", "Generation", "Output"

# Each argument is a prompt, so unquoted words give one image each; GenerateRun then prints a note.
Prompts = Annotated[
    list[str] | None,
    typer.Argument(metavar="PROMPT", help="Text that describes the result; pass several to generate one for each."),
]
PromptsFile = Annotated[
    Text,
    typer.Option(
        "--prompts", metavar="FILE", help="File with one prompt per line; - reads stdin.", rich_help_panel=_INPUT
    ),
]
Negative = Annotated[
    Text,
    typer.Option("--negative", help="Negative prompt: what to avoid. Default: none.", rich_help_panel=_INPUT),
]
Images = Annotated[
    list[str] | None,
    typer.Option("--image", "-i", metavar="PATH", help="Input image; repeatable.", rich_help_panel=_INPUT),
]
Mask = Annotated[
    Text,
    typer.Option(
        "--mask", metavar="PATH", help="Mask of the input image: white is generated anew.", rich_help_panel=_INPUT
    ),
]
Strength = Annotated[
    float | None,
    typer.Option(
        "--strength",
        help="How much to change the input, from 0 to 1. Default: set by the pipeline.",
        rich_help_panel=_INPUT,
    ),
]
Control = Annotated[
    list[str] | None,
    typer.Option(
        "--control", metavar="PATH", help="Control image, such as edges or depth; repeatable.", rich_help_panel=_INPUT
    ),
]
IpImages = Annotated[
    list[str] | None,
    typer.Option("--ip-image", metavar="PATH", help="Image for the IP-Adapter; repeatable.", rich_help_panel=_INPUT),
]
VideoInput = Annotated[
    Text,
    typer.Option("--video", metavar="PATH", help="Input video, or folder of its frames.", rich_help_panel=_INPUT),
]
AudioInput = Annotated[Text, typer.Option("--audio", metavar="PATH", help="Input audio.", rich_help_panel=_INPUT)]
Source = Annotated[
    Text,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Regenerate a file from its metadata; other options override it.",
        rich_help_panel=_INPUT,
    ),
]
GenerateModel = Annotated[
    Text,
    typer.Option(
        "--model", "-m", help="Hub ID or folder of the model. Default: the embedded model.", rich_help_panel=_MODEL
    ),
]
Loras = Annotated[
    list[str] | None,
    typer.Option(
        "--lora", metavar="PATH[:WEIGHT]", help="LoRA: a file, or a Hub ID; repeatable.", rich_help_panel=_MODEL
    ),
]
ControlModels = Annotated[
    list[str] | None,
    typer.Option(
        "--control-model",
        metavar="MODEL",
        help="Folder or Hub ID of the ControlNet; one for each --control.",
        rich_help_panel=_MODEL,
    ),
]
IpAdapters = Annotated[
    list[str] | None,
    typer.Option(
        "--ip-adapter", metavar="PATH[:SCALE]", help="IP-Adapter: a file, or HUB-ID/FILE.", rich_help_panel=_MODEL
    ),
]
Scheduler = Annotated[
    Text,
    typer.Option(
        "--scheduler",
        metavar="NAME",
        help="Scheduler: euler, dpm++2m, unipc, ddim, … or a class name. Default: that of the model.",
        rich_help_panel=_MODEL,
    ),
]
GenerateWeights = Annotated[
    Text,
    typer.Option(
        "--weights",
        metavar="FORMAT",
        help=f"Quantize large models, which changes the result: {', '.join(WEIGHT_FORMATS)}. Default: no quantization.",
        rich_help_panel=_MODEL,
        autocompletion=complete_weights,
    ),
]
GenerateDtype = Annotated[
    Text,
    typer.Option(
        "--dtype",
        help="dtype of weights and computation: float32, bfloat16 or float16. Default: the device's preferred dtype.",
        rich_help_panel=_MODEL,
        autocompletion=complete_dtype,
    ),
]
# These options default to None, unlike in other commands: with --from, None means the value from the metadata of the
# file.
OptionalDevice = Annotated[
    Text,
    typer.Option(
        "--device",
        "-d",
        help="Device to use: auto, cuda, hpu:3, virtual:neuron. Default: auto.",
        rich_help_panel=_MODEL,
        autocompletion=complete_device,
    ),
]
OptionalSpeed = Annotated[
    Text,
    typer.Option(
        "--speed",
        help="Speed level: exact, fast or draft; fast and draft change the result. Default: exact.",
        rich_help_panel=_MODEL,
        autocompletion=complete_speed,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", "-s", help="Seed of the first result of each prompt. Default: random.", rich_help_panel=_CALL
    ),
]
Count = Annotated[
    int, typer.Option("-n", help="Number of results per prompt, with consecutive seeds.", rich_help_panel=_CALL)
]
GenerateSteps = Annotated[
    int | None,
    typer.Option("--steps", help="Number of denoising steps. Default: set by the pipeline.", rich_help_panel=_CALL),
]
Guidance = Annotated[
    float | None,
    typer.Option(
        "--guidance",
        help="Guidance scale: how closely to follow the prompt. Default: set by the pipeline.",
        rich_help_panel=_CALL,
    ),
]
Size = Annotated[
    Text,
    typer.Option(
        "--size",
        metavar="WxH",
        help="Size in pixels: 640x480, or 512 for a square. Default: set by the model.",
        rich_help_panel=_CALL,
    ),
]
Frames = Annotated[
    int | None,
    typer.Option("--frames", help="Number of frames of a video. Default: set by the pipeline.", rich_help_panel=_CALL),
]
Seconds = Annotated[
    float | None,
    typer.Option("--seconds", help="Length of a video or audio, instead of --frames.", rich_help_panel=_CALL),
]
Fps = Annotated[
    float | None,
    typer.Option("--fps", help="Frames per second of a video. Default: that of the model.", rich_help_panel=_CALL),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any other argument of the pipeline's call, such as guidance_rescale=0.7; repeatable.",
        rich_help_panel=_CALL,
    ),
]
Output = Annotated[
    Text,
    typer.Option(
        "--output",
        "-o",
        metavar="PATH|-",
        help="File (.png, .jpg, .webp, .mp4, .webm, .gif, .wav, .flac), folder/ or - for stdout. Default: the current "
        "folder.",
        rich_help_panel=_OUTPUT,
    ),
]
Grid = Annotated[
    bool,
    typer.Option("--grid", help="Also write a contact sheet of all images or video frames.", rich_help_panel=_OUTPUT),
]
Force = Annotated[bool, typer.Option("--force", "-f", help="Overwrite existing files.", rich_help_panel=_OUTPUT)]
Show = Annotated[
    str,
    typer.Option(
        "--show", help=f"How to show results in the terminal: {', '.join(PROTOCOLS)}.", rich_help_panel=_OUTPUT
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=_OUTPUT)]
Explain = Annotated[
    bool,
    typer.Option("--explain", help="Print the placement plan without generating anything.", rich_help_panel=_OUTPUT),
]


def run_generate(
    prompts: Prompts = None,
    prompts_file: PromptsFile = None,
    negative: Negative = None,
    images: Images = None,
    mask: Mask = None,
    strength: Strength = None,
    control: Control = None,
    ip_images: IpImages = None,
    video: VideoInput = None,
    audio: AudioInput = None,
    source: Source = None,
    model: GenerateModel = None,
    loras: Loras = None,
    control_models: ControlModels = None,
    ip_adapters: IpAdapters = None,
    scheduler: Scheduler = None,
    device: OptionalDevice = None,
    dtype: GenerateDtype = None,
    weights: GenerateWeights = None,
    speed: OptionalSpeed = None,
    seed: Seed = None,
    count: Count = 1,
    steps: GenerateSteps = None,
    guidance: Guidance = None,
    size: Size = None,
    frames: Frames = None,
    seconds: Seconds = None,
    fps: Fps = None,
    settings: Settings = None,
    output: Output = None,
    grid: Grid = False,
    force: Force = False,
    show: Show = "auto",
    as_json: Json = False,
    explain: Explain = False,
) -> None:
    """Generate images, videos or audio from prompts and inputs.

    Each file contains the metadata needed to regenerate it with --from.
    """
    # Ranges are checked by GenerateRun and not by typer, which prints errors without a hint. The parameters have the
    # names of the fields; None stands for an option that is not set.
    GenerateRun(Options(**{name: value for name, value in locals().items() if value is not None})).run()
