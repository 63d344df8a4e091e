"""Commands of the documentation, changed to run with tiny models of the same classes and tiny inputs.

`python -m tests.cli.generate.documented_commands FOLDER` runs all of them and writes their outputs to subfolders.
"""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from anyaccel.cli.main import main
from anyaccel.media.encode import encode
from anyaccel.media.types import Audio, Video
from anyaccel.recipes import recipes
from tests.conftest import ROOT
from tests.generation.adapter_files import save_controlnet, save_ip_adapter, save_lora
from tests.generation.models import make_image, make_mask, save_model

__all__ = ["adapt_command", "make_inputs", "read_commands"]

SD = "stable-diffusion-v1-5/stable-diffusion-v1-5"
# The recipe for each model.
MODELS = {
    SD: "stable-diffusion",
    "stable-diffusion-v1-5/stable-diffusion-inpainting": "stable-diffusion-inpaint",
    "stabilityai/stable-diffusion-xl-base-1.0": "stable-diffusion-xl",
    "stabilityai/stable-diffusion-xl-refiner-1.0": "stable-diffusion-xl-refiner",
    "stabilityai/sdxl-turbo": "stable-diffusion-xl",
    "stabilityai/stable-diffusion-3.5-medium": "stable-diffusion-3",
    "stabilityai/stable-diffusion-x4-upscaler": "stable-diffusion-upscale",
    "stabilityai/stable-video-diffusion-img2vid-xt": "stable-video-diffusion",
    "stabilityai/stable-audio-open-1.0": "stable-audio",
    "stabilityai/stable-audio-3-medium": "stable-audio-3",
    "timbrooks/instruct-pix2pix": "instruct-pix2pix",
    "black-forest-labs/FLUX.1-schnell": "flux",
    "black-forest-labs/FLUX.1-dev": "flux",
    "black-forest-labs/FLUX.1-Fill-dev": "flux-fill",
    "black-forest-labs/FLUX.1-Kontext-dev": "flux-kontext",
    "black-forest-labs/FLUX.2-klein-4B": "flux-2-klein",
    "Qwen/Qwen-Image": "qwen-image",
    "Qwen/Qwen-Image-Edit-2509": "qwen-image-edit-plus",
    "Tongyi-MAI/Z-Image-Turbo": "z-image",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": "wan",
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": "wan-image-to-video",
    "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers": "wan-image-to-video",
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": "wan-two-experts",
    "Lightricks/LTX-Video": "ltx",
    "Lightricks/LTX-2": "ltx-2",
    "THUDM/CogVideoX-5b": "cogvideo",
    "hunyuanvideo-community/HunyuanVideo": "hunyuan-video",
    "cvssp/audioldm2": "audio-ldm-2",
}
CONTROLNETS = ("lllyasviel/control_v11p_sd15_canny", "lllyasviel/control_v11f1p_sd15_depth")
# Side lengths of input images, 16 pixels by default.
IMAGES = ("sketch", "room", "hat", "fox", "edges", "style", "depth", "photo", "jacket", "dusk", "canvas")
INPUT_SIDES = {"fox": 64, "hat": 64, "photo": 64, "jacket": 64, "dusk": 64, "depth": 64}
# Shorter than the recipe's videos or audio would be with the documented length.
SHORTER = {"wan": 0.3, "ltx-2": 0.2, "hunyuan-video": 0.2, "stable-audio": 2, "stable-audio-3": 2, "audio-ldm-2": 0.001}
# Arguments of a recipe's call that its tiny models need, and that the documented commands do not set.
_TINY_ARGUMENTS = (
    "max_sequence_length", "text_encoder_out_layers", "spatio_temporal_guidance_blocks", "prompt_template",
    "max_area", "_auto_resize", "decode_chunk_size",
)  # fmt: skip


def read_commands(page: str) -> list[str]:
    """Return the commands in the tables of a page of the documentation, without `anyaccel`."""
    return re.findall(r"^\| .*? \| `anyaccel (generate .*?)` \|$", (ROOT / "docs" / page).read_text(), re.M)


def make_inputs(folder: Path) -> Path:
    """Write the input files of all commands to a folder, and return it."""
    for index, name in enumerate(IMAGES):
        make_image(index, INPUT_SIDES.get(name, 16)).save(folder / f"{name}.png")
    make_mask().save(folder / "sofa.png")
    make_mask(64).save(folder / "border.png")
    (folder / "prompts.txt").write_text("# fruit\na banana\na lemon\n")
    frames = tuple(make_image(index) for index in range(9))
    (folder / "clip.mp4").write_bytes(encode(Video(frames=frames, fps=8.0), ".mp4"))
    (folder / "hum.wav").write_bytes(encode(_make_tone(), ".wav"))
    for seed, name in enumerate(("style", "pixel", "light"), 1):
        save_lora(folder / f"{name}.safetensors", seed)
    save_lora(folder / "lcm.safetensors", recipe="stable-diffusion-xl")
    save_ip_adapter(folder / "ip-adapter_sd15.safetensors")
    save_controlnet(folder / "controlnet")
    return folder


def _make_tone() -> Audio:
    import numpy

    seconds = numpy.arange(32_000) / 16_000
    return Audio(samples=0.5 * numpy.sin(2 * numpy.pi * 440 * seconds)[None].astype(numpy.float32), rate=16_000)


def adapt_command(command: str, folder: Path) -> list[str]:
    """Return the arguments for a command with a tiny model, inputs from the folder, and few steps."""
    arguments = shlex.split(command)
    common = shlex.split("--dtype float32" if "--device" in arguments else "--device cpu --dtype float32")
    common += [] if "--seed" in arguments else ["--seed", "7"]
    if "--model" not in arguments:  # the embedded model
        common += ["--steps", "1"] if "--frames" in arguments else []
        return [str(folder / item) if item == "prompts.txt" else item for item in arguments] + common
    recipe = MODELS[arguments[arguments.index("--model") + 1]]
    call = recipes()[recipe].call()
    variant = "ip-adapter-base" if "--ip-adapter" in arguments else recipe
    model = save_model(
        "wan-first-last" if recipe.startswith("wan-image") and arguments.count("--image") > 1 else variant
    )
    changed: list[str] = []
    pairs = iter(arguments)
    for argument in pairs:
        if argument == "--model":
            changed += [argument, model]
            next(pairs)
        elif argument in ("--size", "--frames", "--seconds", "--steps"):
            changed += [argument, _shrink(argument, next(pairs), recipe, call)]
        elif argument == "-o":
            changed += [argument, next(pairs)]
        else:
            changed.append(_find_input(argument, folder))
    if "--size" not in changed and "height" in call and not _keeps_size(arguments, recipe):
        changed += ["--size", _shrink("--size", "", recipe, call)]
    if "num_frames" in call and not {"--frames", "--seconds"} & set(changed) and "--video" not in changed:
        changed += ["--frames", str(call["num_frames"])]
    if "--steps" not in changed:
        # Strength 0.3 leaves one of four steps.
        changed += ["--steps", "4" if "--strength" in arguments else "2"]
    needed = [f"--set={name}={call[name]!r}" for name in _TINY_ARGUMENTS if call.get(name) is not None]
    return [*changed, *needed, *common]


def _keeps_size(arguments: list[str], recipe: str) -> bool:
    return "--image" in arguments and recipe in ("stable-diffusion", "stable-diffusion-xl")


def _shrink(option: str, value: str, recipe: str, call: dict[str, Any]) -> str:
    """Return a smaller value for an option."""
    if option == "--size":
        return f"{call['width']}x{call['height']}"
    if option == "--seconds":
        return str(SHORTER[recipe])
    return str(call["num_frames"]) if option == "--frames" else str(min(2, int(value)))


def _find_input(argument: str, folder: Path) -> str:
    file, colon, weight = argument.partition(":")
    if argument in CONTROLNETS:
        return str(folder / "controlnet")
    return f"{folder / file}{colon}{weight}" if (folder / file).is_file() else argument


def _main(out: Path) -> None:
    inputs = out / "inputs"
    inputs.mkdir(parents=True)
    make_inputs(inputs)
    for index, command in enumerate([*read_commands("examples.md"), *read_commands("generate.md")]):
        folder = out / f"{index:02}"
        folder.mkdir()
        os.chdir(folder)
        sys.argv = ["anyaccel", *(shlex.split(command) if "--from" in command else adapt_command(command, inputs))]
        print(f"{index:02} {shlex.join(sys.argv)}", flush=True)
        try:
            main()
        except SystemExit as ended:
            print(f"exit status {ended.code}", flush=True)


if __name__ == "__main__":
    _main(Path(sys.argv[1]).resolve())
