"""The commands in the table of `docs/generate.md`, each run with a tiny model of the same class and tiny inputs."""

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from anyaccel.cli.main import main
from anyaccel.generation.media_format import read_metadata
from anyaccel.generation.model_loading import release_model
from tests.conftest import NEEDS_RECIPES, ROOT
from tests.generation.adapter_files import save_controlnet, save_ip_adapter, save_lora
from tests.generation.models import make_image, make_mask, save_model

pytestmark = [NEEDS_RECIPES, pytest.mark.filterwarnings("ignore::FutureWarning")]

COMMANDS = re.findall(r"^\| .*? \| `anyaccel (generate .*?)` \|$", (ROOT / "docs" / "generate.md").read_text(), re.M)
SD = "stable-diffusion-v1-5/stable-diffusion-v1-5"
# The recipe for each model.
MODELS = {
    "stabilityai/stable-diffusion-xl-base-1.0": "stable-diffusion-xl",
    SD: "stable-diffusion",
    "black-forest-labs/FLUX.2-klein-4B": "flux-2-klein",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": "wan",
    "Lightricks/LTX-Video": "ltx",
    "Lightricks/LTX-2": "ltx-2",
    "stabilityai/stable-audio-open-1.0": "stable-audio",
}
# Sizes and lengths for tiny models.
SMALLER = {
    "--size 1024": "--size 16", "--size 832x480": "--size 16x16", "--seconds 5": "--seconds 0.3",
    "--frames 97": "--frames 9", "--seconds 4": "--seconds 0.2", "--seconds 10": "--seconds 2", "--steps 20": "",
}  # fmt: skip
NEEDED = {
    "flux-2-klein": "--size 16 --set max_sequence_length=64 --set text_encoder_out_layers=(1,1,2)",
    "wan": "--set max_sequence_length=32",
    "ltx": "--size 32 --set max_sequence_length=32",
    "ltx-2": "--size 32 --set max_sequence_length=16 --set spatio_temporal_guidance_blocks=[1]",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the input files of all commands."""
    path = tmp_path_factory.mktemp("inputs")
    for index, name in enumerate(("sketch", "room", "hat", "fox", "edges", "style")):
        make_image(index, 64 if name in ("fox", "hat") else 16).save(path / f"{name}.png")
    make_mask().save(path / "sofa.png")
    save_lora(path / "style.safetensors")
    save_ip_adapter(path / "ip-adapter_sd15.safetensors")
    save_controlnet(path / "controlnet")
    yield path
    release_model()


def adapt(command: str, folder: Path) -> list[str]:
    """Return the arguments for a command with a tiny model, inputs from the folder, and few steps."""
    for text, smaller in SMALLER.items():
        command = re.sub(rf"{text}(?= )", smaller, command)
    arguments = shlex.split(command)
    model = arguments[arguments.index("--model") + 1] if "--model" in arguments else None
    recipe = None if model is None else MODELS[model]
    if recipe == "stable-diffusion" and "--ip-adapter" in arguments:
        recipe = "ip-adapter-base"
    adapted = []
    for argument in arguments:
        file, colon, weight = argument.partition(":")
        if argument == model and recipe is not None:
            adapted.append(save_model(recipe))
        elif argument == "lllyasviel/control_v11p_sd15_canny":
            adapted.append(str(folder / "controlnet"))
        elif (folder / file).is_file() and adapted[-1] != "-o":
            adapted.append(f"{folder / file}{colon}{weight}")
        else:
            adapted.append(argument)
    more = shlex.split(NEEDED.get(recipe or "", ""))
    return [*adapted, "--device", "cpu", "--dtype", "float32", "--steps", "2", "--seed", "7", *more]


def run(monkeypatch: pytest.MonkeyPatch, capfd: Any, arguments: list[str]) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["anyaccel", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return (int(caught.value.code or 0), *capfd.readouterr())


def test_documentation_has_the_commands() -> None:
    assert len(COMMANDS) == 13


@pytest.mark.parametrize("command", [command for command in COMMANDS if "--from" not in command])
def test_command(command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.chdir(tmp_path)
    if re.search(r"\.(mp4|webm)", command):
        pytest.importorskip("av")
    if ".wav" in command:
        pytest.importorskip("soundfile")
    status, out, err = run(monkeypatch, capfd, adapt(command, folder))
    assert status == 0, err
    output = shlex.split(command)[shlex.split(command).index("-o") + 1]
    assert out.splitlines()[0] == f"{output}  seed 7"
    (metadata,) = read_metadata(output)
    assert metadata.kind == {".png": "image", ".wav": "audio"}.get(Path(output).suffix, "video")
    if "--grid" in command:
        with Image.open("fox-grid.png") as sheet:
            assert sheet.width > 2 * 32
    # --from repeats the result from the file alone.
    again = f"again{Path(output).suffix}"
    status, out, err = run(monkeypatch, capfd, ["generate", "--from", output, "-o", again])
    assert status == 0, err
    assert "warning" not in err
    assert Path(again).read_bytes() == Path(output).read_bytes()


def test_from_with_another_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    pytest.importorskip("av")
    monkeypatch.chdir(tmp_path)
    video = next(command for command in COMMANDS if "Wan" in command)
    again = next(command for command in COMMANDS if "--from" in command)
    assert run(monkeypatch, capfd, adapt(video, tmp_path))[0] == 0
    assert run(monkeypatch, capfd, shlex.split(again))[:2] == (0, "fox2.mp4  seed 8\n")
    first, second = read_metadata("fox.mp4")[0], read_metadata("fox2.mp4")[0]
    assert (first.call, first.frames, first.fps) == (second.call, second.frames, second.fps)
    assert first.scheduler_config == second.scheduler_config
