"""`explain`: default sizes, videos, audio, and folders without the configs of the text encoders."""

import json
import shutil
import warnings
from pathlib import Path

import pytest

import anyaccel
from anyaccel.embedded.model import find_embedded_model
from anyaccel.errors import ModelError, UsageError
from anyaccel.explanation.text import describe_explanation
from anyaccel.planning.memory import Forecast
from anyaccel.recipes import recipes

WAN = Path(__file__).parents[2] / "benchmarks" / "models" / "wan2.1-t2v-1.3b"


def save(recipe: str, folder: Path) -> Path:
    with warnings.catch_warnings():  # some models use deprecated functions of torch
        warnings.simplefilter("ignore")
        recipes()[recipe].make().save_pretrained(folder)  # type: ignore[attr-defined]
    return folder


def explain(folder: Path, **arguments: object) -> tuple[Forecast, list[str]]:
    plan = anyaccel.explain(folder, "h200", **arguments)  # type: ignore[arg-type]
    assert plan.forecast is not None
    return plan.forecast, describe_explanation(plan, "model")


def test_a_video_has_the_default_size_of_its_pipeline_even_without_the_text_encoder() -> None:
    forecast, lines = explain(WAN, memory="resident")
    assert (forecast.kind, forecast.size, forecast.frames) == ("video", (832, 480), 81)
    assert lines[1] == "1 video of 832 × 480, 81 frames, 5.06 s at 16 frames per second in bfloat16, WanPipeline"
    assert forecast.not_included == ("text_encoder",)
    assert "text_encoder" not in dict(forecast.components)
    assert forecast.notes[0].startswith("text_encoder (UMT5EncoderModel) is not included: ")
    assert any(line.endswith("of 139 GiB, without text_encoder") for line in lines)
    assert forecast.to_dict()["frames"] == 81
    assert (forecast.to_dict()["fps"], forecast.to_dict()["seconds"]) == (16, 81 / 16)


def test_the_number_of_frames_changes_the_memory(tmp_path: Path) -> None:
    folder = save("wan", tmp_path)
    few, many = (explain(folder, height=64, width=64, frames=frames)[0] for frames in (5, 17))
    assert (few.frames, many.frames) == (5, 17)
    assert dict(few.phases)["decode"] < dict(many.phases)["decode"]


def test_seconds_and_frame_rate_set_the_number_of_frames(tmp_path: Path) -> None:
    folder, size = save("wan", tmp_path / "wan"), {"height": 64, "width": 64}
    forecast, lines = explain(folder, seconds=1, **size)
    assert (forecast.frames, forecast.fps, forecast.seconds) == (17, 16, 17 / 16), "Wan's rate, and 4 n + 1 frames"
    assert "17 frames, 1.06 s at 16 frames per second" in lines[1]
    forecast, _ = explain(folder, seconds=1, fps=8, **size)
    assert (forecast.frames, forecast.fps) == (9, 8)
    forecast, _ = explain(folder, frames=5, fps=10, **size)
    assert (forecast.frames, forecast.fps, forecast.seconds) == (5, 10, 0.5)
    forecast, _ = explain(save("ltx", tmp_path / "ltx"), seconds=0.5, fps=20, **size)
    assert (forecast.frames, forecast.fps) == (9, 20), "8 n + 1 frames; the rate is an argument of the call"


def test_seconds_set_the_duration_of_audio(tmp_path: Path) -> None:
    folder = save("stable-audio", tmp_path)
    short, long = (explain(folder, seconds=seconds)[0] for seconds in (0.5, 1.0))
    assert (short.kind, short.fps) == ("audio", None)
    assert short.seconds
    assert long.seconds
    assert short.seconds < long.seconds


@pytest.mark.parametrize("recipe", ["wan", "ltx", "cogvideo"])
def test_a_tiny_video_pipeline_has_the_largest_size_that_its_config_supports(recipe: str, tmp_path: Path) -> None:
    forecast, _ = explain(save(recipe, tmp_path))
    assert forecast.kind == "video"
    assert forecast.frames
    assert any("does not support the default" in note for note in forecast.notes)


def test_a_size_that_the_config_does_not_support_raises(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"does not support 1024 × 1024(.|\n)*the largest size with this aspect ratio"):
        explain(save("wan", tmp_path), height=1024, width=1024)


@pytest.mark.parametrize("recipe", ["stable-audio", "audio-ldm-2"])
def test_audio_has_a_duration(recipe: str, tmp_path: Path) -> None:
    forecast, lines = explain(save(recipe, tmp_path))
    assert (forecast.kind, forecast.size, forecast.frames) == ("audio", None, None)
    assert forecast.seconds
    assert lines[1].startswith("1 audio clip of ")


def test_mochi_uses_autocast(tmp_path: Path) -> None:
    assert explain(save("mochi", tmp_path), height=64, width=64, frames=7)[0].kind == "video"


def test_frames_of_an_image_raise() -> None:
    with pytest.raises(UsageError, match="no argument for the number of frames"):
        anyaccel.explain(find_embedded_model(), "h200", frames=5)
    with pytest.raises(UsageError, match="the number of frames must be an integer"):
        anyaccel.explain(WAN, "h200", frames=0)
    with pytest.raises(UsageError, match="no argument for the duration"):
        anyaccel.explain(find_embedded_model(), "h200", seconds=5)
    with pytest.raises(UsageError, match="the duration must be a positive number of seconds, not -1"):
        anyaccel.explain(WAN, "h200", seconds=-1)
    with pytest.raises(UsageError, match="--seconds and --frames cannot be combined"):
        anyaccel.explain(WAN, "h200", seconds=1, frames=5)


def test_a_missing_denoiser_raises(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(WAN, folder)
    (folder / "transformer" / "config.json").unlink()
    with pytest.raises(ModelError, match="requires transformer"):
        explain(folder)
    assert "text_encoder" not in json.loads((folder / "model_index.json").read_text())
