"""Videos of the embedded model: with its motion module, or with an untrained one of the same shape."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image
from selenium.webdriver import Chrome
from selenium.webdriver.support.wait import WebDriverWait

from anyaccel.cli.main import main
from anyaccel.embedded.motion import FRAMES, find_motion_module, fit_video_call, load_video_pipeline
from anyaccel.errors import ModelError, UsageError
from anyaccel.explanation.explain import explain
from anyaccel.generation.generate import Result, generate
from anyaccel.generation.media_format import read_metadata
from anyaccel.generation.model_loading import release_model
from anyaccel.generation.model_name import find_revision, resolve_model
from anyaccel.media.decode import decode_video
from anyaccel.processes.forked_call import call_in_fork
from anyaccel.runtime.pipeline import DiffusionPipeline
from tests.browser import open_browser
from tests.conftest import NEEDS_RECIPES
from tests.generation.models import save_motion_module
from tests.media.samples import measure_psnr

pytestmark = NEEDS_RECIPES
Run = Callable[..., tuple[int, str, str]]
SIDE = 32
FAST: dict[str, Any] = {"width": SIDE, "height": SIDE, "num_inference_steps": 1, "guidance_scale": 1.0}
CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "seed": 7, **FAST}
OPTIONS = ("--size", str(SIDE), "--steps", "1", "--guidance", "1", "--device", "cpu", "--dtype", "float32")
PLAYER = "document.querySelector('video')"
PROMPT = "a rocket flying to the left"
# Measured for the random video of these tests, which is harder to compress than a generated one: 30.4 to 35 dB.
MIN_PSNR_DB = 28


def pixels(frames: Sequence[Image.Image]) -> Any:
    return numpy.stack([numpy.asarray(frame) for frame in frames])


def read_frames(file: str | Path) -> Any:
    return pixels(decode_video(Path(file), max_frames=20, max_pixels=10**6).frames)


@pytest.fixture(scope="module")
def module() -> str:
    return save_motion_module()


@pytest.fixture(scope="module")
def result(module: str) -> Result:
    return generate(PROMPT, module, frames=FRAMES, **CPU)


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    with open_browser() as chrome:
        yield chrome


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Run:
    """Run a command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run_here(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["anyaccel", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        return (int(caught.value.code or 0), *capfd.readouterr())

    return run_here


def test_the_video_equals_that_of_plain_diffusers(module: str, result: Result) -> None:
    import torch

    (video,) = result.videos
    assert (len(video), video.fps, video.frames[0].size) == (FRAMES, 8, (SIDE, SIDE))
    pipe = load_video_pipeline(Path(module))
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(7)
    expected = pipe(PROMPT, num_frames=FRAMES, generator=generator, output_type="pil", **FAST).frames[0]
    assert numpy.array_equal(pixels(video.frames), pixels(expected))
    # The frames differ: the random module has an effect.
    assert len({frame.tobytes() for frame in video.frames}) == FRAMES


def test_metadata_names_the_pipeline_and_the_module(module: str, result: Result) -> None:
    (metadata,) = result.metadata
    assert (metadata.kind, metadata.frames, metadata.fps) == ("video", FRAMES, 8)
    assert (metadata.pipeline, metadata.steps, metadata.guidance) == ("AnimateDiffPipeline", 1, 1.0)
    assert Path(metadata.model).expanduser() == Path(module)
    assert not metadata.is_from_hub
    again = generate(**metadata.arguments())
    assert numpy.array_equal(pixels(again.videos[0].frames), pixels(result.videos[0].frames))


def test_revision_depends_on_the_module(module: str, tmp_path: Path) -> None:
    revision = find_revision(resolve_model(module))
    assert revision is not None
    assert revision != find_revision(resolve_model("embedded"))
    copy = Path(shutil.copytree(module, tmp_path / "copy"))
    assert find_revision(resolve_model(copy)) == revision
    weights = bytearray((copy / "diffusion_pytorch_model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "diffusion_pytorch_model.safetensors").write_bytes(weights)
    assert find_revision(resolve_model(copy)) != revision


@pytest.mark.parametrize(
    ("call", "fps", "frames"),
    [
        ({"frames": FRAMES}, None, FRAMES),
        ({"num_frames": FRAMES, "fps": 12}, 12, None),
        ({"seconds": 4}, 4, FRAMES),
        ({"seconds": 2, "fps": 8}, 8, FRAMES),
        ({"seconds": 1, "fps": 8}, 8, 8),
        ({"fps": 10}, 10, None),
    ],
)
def test_a_duration_sets_the_frame_rate(call: dict[str, Any], fps: float | None, frames: int | None) -> None:
    fitted = fit_video_call(call)
    assert "seconds" not in fitted
    assert (fitted.get("fps"), fitted.get("frames")) == (fps, frames)


def test_duration_of_a_video(module: str) -> None:
    (video,) = generate(PROMPT, module, seconds=1, fps=8, **CPU).videos
    assert (len(video), video.fps, video.seconds) == (8, 8, 1)


@pytest.mark.parametrize("call", [{"frames": 7}, {"num_frames": 17}, {"seconds": 1, "fps": 7}])
def test_other_numbers_of_frames_are_rejected(module: str, call: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"generates videos of 8 to 16 frames, not (7|17)") as raised:
        generate(PROMPT, module, **call, **CPU)
    assert "--frames 16" in raised.value.hint


def test_frames_and_seconds_cannot_be_combined(module: str) -> None:
    with pytest.raises(UsageError, match="cannot be combined"):
        generate(PROMPT, module, frames=FRAMES, seconds=2, **CPU)


@pytest.mark.parametrize("suffix", [".mp4", ".webm", ".webp", ".gif"])
def test_files_contain_the_frames(result: Result, tmp_path: Path, suffix: str) -> None:
    if suffix in (".mp4", ".webm"):
        pytest.importorskip("av")
    (file,) = result.save(tmp_path / f"rocket{suffix}")
    decoded = decode_video(file, max_frames=20, max_pixels=10**6)
    assert (len(decoded), decoded.fps) == (FRAMES, 8)
    for frame, expected in zip(decoded.frames, result.videos[0].frames, strict=True):
        assert measure_psnr(frame, expected) > MIN_PSNR_DB


@pytest.mark.long
def test_command_writes_a_video_that_from_reproduces(run: Run, module: str, result: Result) -> None:
    pytest.importorskip("av")
    status, out, err = run(
        "generate", PROMPT, "--model", module, "--frames", "16", "-s", "7", *OPTIONS, "-o", "rocket.mp4", "--grid"
    )
    assert status == 0, err
    assert out.splitlines() == ["rocket.mp4  seed 7", "rocket-grid.png  1 video"]
    assert "does not know" not in err
    (metadata,) = read_metadata("rocket.mp4")
    assert (metadata.frames, metadata.prompt) == (FRAMES, PROMPT)
    status, _, err = run("generate", "--from", "rocket.mp4", "-o", "again.mp4")
    assert status == 0, err
    assert "warning" not in err
    assert Path("again.mp4").read_bytes() == Path("rocket.mp4").read_bytes()
    result.save("python.mp4")
    assert numpy.array_equal(read_frames("python.mp4"), read_frames("rocket.mp4"))


@pytest.mark.long
def test_batch_rows(run: Run, module: str, result: Result) -> None:
    release_model()
    rows = [
        {"prompt": PROMPT, "frames": 16, "seed": 7, **FAST},
        {"prompt": "a cat growing", "seconds": 4, "seed": 7, **FAST},
        {"prompt": "a cat growing", "frames": 7, **FAST},
    ]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    status, _, err = run("batch", "rows.jsonl", "--model", module, "--out", "out", "--device", "cpu")
    assert status == 1, err
    assert "generates videos of 8 to 16 frames, not 7" in err
    entries = {entry["row"]: entry for entry in map(json.loads, Path("out/manifest.jsonl").read_text().splitlines())}
    first, second = (Path("out") / entries[row]["path"] for row in (1, 2))
    assert (read_metadata(first)[0].fps, read_metadata(second)[0].fps) == (8, 4)
    assert numpy.array_equal(read_frames(first), read_frames(result.save(f"again{first.suffix}")[0]))


def test_a_file_name_for_a_video_without_frames_has_a_hint(run: Run) -> None:
    status, _, err = run("generate", PROMPT, "-o", "rocket.gif")
    assert status == 2
    assert ".gif is a format for videos" in err
    assert "add --frames 16 for a video" in err


def test_batch_of_images_and_videos_is_rejected(run: Run) -> None:
    Path("rows.jsonl").write_text('{"prompt": "a cat"}\n{"prompt": "a cat growing", "frames": 16}')
    status, _, err = run("batch", "rows.jsonl", "--out", "out")
    assert status == 2
    assert "line 1 is an image, and other lines are videos" in err


@pytest.mark.long
@pytest.mark.parametrize("device", ["virtual:mps", "virtual:hpu", "virtual:neuron"])
def test_virtual_devices(module: str, result: Result, device: str) -> None:
    def measure() -> float:
        other = generate(PROMPT, module, frames=FRAMES, **{**CPU, "device": device})
        frames = zip(other.videos[0].frames, result.videos[0].frames, strict=True)
        return min(measure_psnr(frame, expected) for frame, expected in frames)

    # In a child process, because a process can have one virtual device.
    assert call_in_fork(measure) > 40


@pytest.mark.long
def test_explain(module: str) -> None:
    plan = explain(module, "rtx4090", frames=FRAMES)
    assert plan.pipeline == "AnimateDiffPipeline"
    assert plan.forecast is not None
    names = [name for name, _ in plan.forecast.components]
    assert {"unet", "vae", "text_encoder"} <= set(names)


@pytest.mark.slow
def test_bench(run: Run, module: str) -> None:
    status, out, err = run(
        "bench", module, "--frames", "16", "--size", str(SIDE), "--steps", "1", "--rounds", "1", "--images", "1",
        "--against", "eager", "--device", "cpu", "--dtype", "float32", "--json",
    )  # fmt: skip
    assert status == 0, err
    (row,) = json.loads(out)["rows"]
    assert row["title"] == module
    assert set(row["variants"]) == {"stock eager", "anyaccel"}


def test_from_pretrained_loads_the_folder(module: str) -> None:
    pipe = DiffusionPipeline.from_pretrained(module, device="cpu", dtype="float32")
    assert type(pipe).__name__ == "AnimateDiffPipeline"


def test_folder_without_a_module(tmp_path: Path, module: str) -> None:
    for action in (find_motion_module, load_video_pipeline):
        with pytest.raises(ModelError, match="its motion module is not part of this version") as raised:
            action(tmp_path)
        assert "--model" in raised.value.hint
    # A motion module without the LoRA file is not one for the embedded model.
    copy = Path(shutil.copytree(module, tmp_path / "copy"))
    (copy / "pytorch_lora_weights.safetensors").unlink()
    with pytest.raises(ModelError, match="is not a pipeline"):
        resolve_model(copy)


@pytest.mark.long
def test_mp4_plays_in_a_browser(result: Result, browser: Chrome, tmp_path: Path) -> None:
    pytest.importorskip("av")
    result.save(tmp_path / "rocket.mp4")
    (tmp_path / "page.html").write_text('<video autoplay muted loop src="rocket.mp4"></video>')
    browser.get((tmp_path / "page.html").as_uri())
    WebDriverWait(browser, 60, 0.05).until(lambda chrome: chrome.execute_script(f"return {PLAYER}.currentTime > 0.1"))
    facts = browser.execute_script(f"return [{PLAYER}.videoWidth, {PLAYER}.videoHeight, {PLAYER}.duration]")
    assert facts == [SIDE, SIDE, pytest.approx(2, abs=0.01)]
