"""`anyaccel generate` for videos and audio: errors before the model is loaded, progress, previews and JSON."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anyaccel.cli.generate.runner import GenerateRun
from anyaccel.cli.main import main
from anyaccel.generation.media_format import read_metadata
from anyaccel.generation.model_loading import release_model
from anyaccel.media.decode import decode_audio, decode_video
from tests.cli.terminal import run_on_terminal
from tests.conftest import NEEDS_RECIPES
from tests.generation.models import SIZE, make_image, save_model
from tests.small_disk import fill, mount_small_disk

pytestmark = [NEEDS_RECIPES, pytest.mark.filterwarnings("ignore::FutureWarning")]
Run = Callable[..., tuple[int, str, str]]
CPU = ("--device", "cpu", "--dtype", "float32", "--seed", "7", "--steps", "2")
WAN = ("--size", str(SIZE), "--frames", "5", "--set", "max_sequence_length=32", *CPU)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Run:
    """Run the command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run_here(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["anyaccel", "generate", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        return (int(caught.value.code or 0), *capfd.readouterr())

    return run_here


def test_file_of_the_default_format(run: Run) -> None:
    pytest.importorskip("av")
    status, out, err = run("a red fox", "--model", save_model("wan"), *WAN, "--fps", "8", "--json")
    assert status == 0, err
    (document,) = json.loads(out)
    assert document["path"] == "a-red-fox-7.mp4"
    assert {"kind": "video", "frames": 5, "fps": 8, "width": SIZE}.items() <= document.items()
    video = decode_video(Path("a-red-fox-7.mp4"), max_frames=9, max_pixels=10**6)
    assert (len(video), video.fps) == (5, 8)


def test_audio_file(run: Run) -> None:
    pytest.importorskip("soundfile")
    status, out, err = run("rain", "--model", save_model("stable-audio"), *CPU, "--seconds", "2")
    assert (status, out) == (0, "rain-7.wav  seed 7\n"), err
    assert decode_audio(Path("rain-7.wav"), max_seconds=9).seconds == 2
    assert Path("rain-7.wav.json").exists()
    assert read_metadata("rain-7.wav")[0].sampling_rate == 8
    status, out, err = run("--from", "rain-7.wav", "-o", "again.wav")
    assert status == 0, err
    assert Path("again.wav").read_bytes() == Path("rain-7.wav").read_bytes()


def test_unknown_frame_rate_has_a_note(run: Run) -> None:
    status, _, err = run("a red fox", "--model", save_model("model-scope"), *CPU, "--size", "16", "-o", "a.webp")
    assert status == 0, err
    assert "note: the frame rate of TextToVideoSDPipeline is not known; the file has 16: set it with --fps" in err


@pytest.mark.parametrize(
    ("recipe", "arguments", "message", "hint"),
    [
        ("wan", ["x", "-o", "a.png"], "a .png file cannot contain video", ".mp4"),
        ("wan", ["x", "-o", "a.wav"], "a .wav file cannot contain video", ".mp4"),
        ("wan", ["x", "--fps", "60", "-o", "a.gif"], "a .gif file can have at most 50 frames per second", ".webp"),
        ("stable-audio", ["x", "-o", "a.mp4"], "a .mp4 file cannot contain audio without video", ".wav"),
        ("stable-audio", ["x", "--grid", "-o", "a.flac"], "audio, which has no contact sheet", "omit --grid"),
        ("stable-diffusion", ["x", "-o", "a.mp4"], "a .mp4 file cannot contain an image", ".png"),
        ("stable-diffusion", ["--image", "in.png"], "missing prompt", "a red apple"),
        ("stable-diffusion", ["x", "--image", "none.png"], "none.png of --image does not exist", "path"),
        ("stable-diffusion", ["x", "--image", "text.png"], "text.png", ".png or .webp file"),
        ("stable-diffusion", ["x", "--strength", "2"], "the strength must be from 0 to 1", "--strength 0.6"),
        ("stable-diffusion", ["x", "--frames", "0"], "number of frames must be an integer from 1", "--frames 16"),
        ("stable-diffusion", ["x", "--fps", "nan"], "the frame rate must be a positive number", "--fps 24"),
        ("stable-diffusion", ["x", "--seconds", "1", "--frames", "3"], "cannot be combined", "one of them"),
        ("stable-diffusion", ["x", "--set", "guidance_scale=3"], "with its own option", "use --guidance"),
        ("stable-diffusion", ["x", "--set", "guidance_rescal=3"], "guidance_rescal", "did you mean guidance_rescale?"),
        ("stable-diffusion", ["x", "--set", "eta=high"], "eta must be float", "--set"),
        ("stable-diffusion", ["x", "--set", "eta"], "the form NAME=VALUE", "--set"),
        ("stable-diffusion", ["x", "--image", "in.png", "--size", "32"], "does not accept the argument", "size of the"),
        ("stable-diffusion", ["x", "--lora", "none.safetensors"], "does not exist", "Hub ID"),
    ],
)
def test_errors_before_the_model_is_loaded(
    run: Run, recipe: str, arguments: list[str], message: str, hint: str
) -> None:
    release_model()
    for extra in ("av", "soundfile"):
        pytest.importorskip(extra)
    make_image().save("in.png")
    Path("text.png").write_text("not an image")
    status, out, err = run(*arguments, "--model", save_model(recipe), *CPU)
    assert (status, out) == (2, ""), err
    assert message in err
    assert hint in err.partition("hint:")[2]
    assert "on cpu:0" not in err, "the model was loaded"


def test_full_disk_is_noticed_before_the_model_is_loaded(run: Run, tmp_path: Path) -> None:
    release_model()
    with mount_small_disk(tmp_path / "disk", 2**20) as disk:
        arguments = ("a red fox", "--model", save_model("wan"), *WAN, "-o", "disk/a.webp")
        status, out, err = run(*arguments, "--frames", "9997")
        assert (status, out) == (2, ""), err
        assert "of free space" in err
        assert "on cpu:0" not in err
        assert list(disk.iterdir()) == []
        status, _, err = run(*arguments)  # 5 frames
        assert status == 0, err


def test_disk_that_fills_up_while_a_video_is_encoded(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mount_small_disk(tmp_path / "disk", 2**20) as disk:
        monkeypatch.setattr(GenerateRun, "on_frame", lambda run, done, total: fill(disk, 0))
        status, out, err = run("a red fox", "--model", save_model("wan"), *WAN, "-o", "disk/a.webp")
        assert (status, out) == (3, ""), err
        assert "No space left on device" in err
        assert [path.name for path in disk.iterdir()] == ["filler"]


def test_terminal_shows_steps_frames_and_a_preview(tmp_path: Path, run: Run) -> None:
    assert run("a", "--model", save_model("wan"), *WAN, "-o", "a.webp")[0] == 0  # loads the model for the fork
    screen = run_on_terminal(["generate", "a red fox", "--model", save_model("wan"), *WAN, "-o", "b.webp"])
    assert screen.status == 0, screen.text
    assert "Generating video" in screen.text
    assert "Encoding video" in screen.text
    assert "▀" in screen.text
    assert (tmp_path / "b.webp").read_bytes() != b""


def test_ctrl_c_while_a_video_is_encoded_leaves_no_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames: list[int] = []

    def stop(run: GenerateRun, done: int, total: int) -> None:
        frames.append(done)
        raise KeyboardInterrupt

    monkeypatch.setattr(GenerateRun, "on_frame", stop)
    assert run("a red fox", "--model", save_model("wan"), *WAN, "-o", "a.webp")[0] == 130
    assert len(frames) == 1
    assert list(tmp_path.iterdir()) == []


def test_images_of_one_run_are_those_of_separate_runs(run: Run) -> None:
    """Two prompts with an input image: each has its own call."""
    make_image().save("in.png")
    common = ("--model", save_model("stable-diffusion"), "--image", "in.png", "--strength", "0.6", *CPU)
    assert run("a fox", "a bird", *common, "-o", "both/")[0] == 0
    assert run("a bird", *common, "-o", "bird.png")[0] == 0
    files = sorted(Path("both").iterdir())
    assert [file.name for file in files] == ["a-bird-7.png", "a-fox-7.png"]
    assert files[0].read_bytes() == Path("bird.png").read_bytes()


def test_help_has_sections(run: Run) -> None:
    status, out, _ = run("--help")
    assert status == 0
    titles = [line for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["Arguments:", "Input:", "Model:", "Generation:", "Output:", "Options:"]
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out.replace("ddim, …", "")
