"""`anyaccel.generate` for videos and audio: the results of stock diffusers, their length, and their files."""

from pathlib import Path
from typing import Any

import numpy
import pytest

from anyaccel.errors import UsageError
from anyaccel.generation.generate import generate
from anyaccel.generation.media_format import read_metadata
from anyaccel.media.decode import decode_video
from anyaccel.media.types import Audio, Video
from tests.conftest import NEEDS_RECIPES
from tests.generation.models import CPU, LIBRARY, SIZE, call_pipe, call_stock, make_image, pixels, save_model

# torch deprecates `weight_norm`, which diffusers uses for audio.
pytestmark = [NEEDS_RECIPES, pytest.mark.filterwarnings("ignore::FutureWarning")]
WAN: dict[str, Any] = {"width": SIZE, "height": SIZE, "max_sequence_length": 32}
LTX_2: dict[str, Any] = {
    "width": 32, "height": 32, "max_sequence_length": 16, "spatio_temporal_guidance_blocks": [1],
}  # fmt: skip


def make_wan(**call: Any) -> Any:
    return generate("a red fox", save_model("wan"), **{**CPU, **WAN, **call})


def test_video_equals_that_of_stock_diffusers() -> None:
    result = make_wan(frames=5, fps=12)
    (video,) = result.videos
    assert isinstance(video, Video)
    assert (video.fps, len(video), result.images, len(result)) == (12, 5, [], 1)
    expected = call_stock(save_model("wan"), num_frames=5, output_type="pil", **WAN).frames[0]
    assert numpy.array_equal(pixels(video.frames), pixels(expected))
    (metadata,) = result.metadata
    assert (metadata.kind, metadata.frames, metadata.fps, metadata.width) == ("video", 5, 12, SIZE)
    assert repr(result) == "Result(1 video, seed 7, on cpu:0 in float32)"


def test_seconds_are_rounded_to_a_frame_count_of_the_model() -> None:
    # 16 frames per second, and two frames per latent frame after the first one.
    result = make_wan(seconds=0.5)
    assert (len(result.videos[0]), result.videos[0].fps) == (9, 16)
    with pytest.raises(UsageError, match="cannot be combined"):
        make_wan(seconds=0.5, frames=5)


def test_video_with_audio_equals_that_of_stock_diffusers() -> None:
    model = save_model("ltx-2")
    (video,) = generate("a red fox", model, frames=5, fps=10, **CPU, **LTX_2).videos
    expected = call_stock(model, num_frames=5, frame_rate=10, output_type="pil", **LTX_2)
    assert numpy.array_equal(pixels(video.frames), pixels(expected.frames[0]))
    assert video.audio is not None
    assert numpy.array_equal(video.audio.samples, expected.audio[0].numpy())
    pipe = LIBRARY.DiffusionPipeline.from_pretrained(model)
    assert (video.fps, video.audio.rate) == (10, pipe.vocoder.config.output_sampling_rate)


def test_audio_equals_that_of_stock_diffusers() -> None:
    model = save_model("stable-audio")
    result = generate("a red fox", model, seconds=2, **CPU)
    (audio,) = result.audios
    assert isinstance(audio, Audio)
    assert (audio.rate, audio.seconds, result.metadata[0].sampling_rate) == (8, 2, 8)
    expected = call_stock(model, audio_end_in_s=2.0).audios[0].numpy()
    assert numpy.array_equal(audio.samples, expected)
    with pytest.raises(UsageError, match="no argument for the number of frames"):
        generate("a red fox", model, frames=5, **CPU)


def test_modular_video_equals_that_of_stock_diffusers() -> None:
    model = save_model("ltx-modular")
    call: dict[str, Any] = {"width": 32, "height": 32, "max_sequence_length": 32}
    (video,) = generate("a red fox", model, frames=9, **CPU, **call).videos
    pipe = LIBRARY.ModularPipeline.from_pretrained(model)
    pipe.load_components()
    expected = call_pipe(pipe, num_frames=9, output="videos", output_type="pil", **call)[0]
    assert numpy.array_equal(pixels(video.frames), pixels(expected))


def test_modular_image_to_video() -> None:
    """The blocks are chosen by the inputs."""
    model, image = save_model("ltx-modular"), make_image(size=32)
    call: dict[str, Any] = {"width": 32, "height": 32, "max_sequence_length": 32}
    result = generate("a red fox", model, image=image, frames=9, **CPU, **call)
    pipe = LIBRARY.ModularPipeline.from_pretrained(model)
    pipe.load_components()
    expected = call_pipe(pipe, image=image, num_frames=9, output="videos", output_type="pil", **call)[0]
    assert numpy.array_equal(pixels(result.videos[0].frames), pixels(expected))


def test_modular_video_with_audio() -> None:
    model = save_model("ltx-2-modular")
    call: dict[str, Any] = {"width": 32, "height": 32, "max_sequence_length": 16}
    (video,) = generate("a red fox", model, frames=5, fps=24, **CPU, **call).videos
    assert (len(video), video.fps) == (5, 24)
    assert video.audio is not None
    assert video.audio.samples.shape[1] > 1


def test_file_reproduces_its_video(tmp_path: Path) -> None:
    result = make_wan(frames=5)
    (file,) = result.save(tmp_path / "fox.webp")
    assert read_metadata(file) == result.metadata
    assert decode_video(file, max_frames=9, max_pixels=10**6).fps == pytest.approx(16, rel=0.02)
    again = generate(**read_metadata(file)[0].arguments())
    assert numpy.array_equal(pixels(again.videos[0].frames), pixels(result.videos[0].frames))
    with pytest.raises(UsageError, match=r"\.png"):
        result.save(tmp_path / "fox.png")


def test_files_of_audio_have_the_metadata(tmp_path: Path) -> None:
    pytest.importorskip("soundfile")
    result = generate("a red fox", save_model("stable-audio"), seconds=2, **CPU)
    for suffix in (".wav", ".flac"):
        (file,) = result.save(tmp_path / f"fox{suffix}")
        assert read_metadata(file) == result.metadata
    again = generate(**read_metadata(file)[0].arguments())
    assert numpy.array_equal(again.audios[0].samples, result.audios[0].samples)
    assert '<audio controls src="data:audio/' in result._repr_html_()


def test_file_of_a_video_with_audio_and_notebook(tmp_path: Path) -> None:
    pytest.importorskip("av")
    result = generate("a red fox", save_model("ltx-2"), frames=5, **CPU, **LTX_2)
    (file,) = result.save(tmp_path / "fox.mp4")
    assert read_metadata(file) == result.metadata
    shown = result._repr_html_()
    assert '<video controls loop src="data:video/mp4;base64,' in shown
    assert "Result(1 video, seed 7" in shown


def test_frame_rate_that_is_not_known_has_a_note() -> None:
    from anyaccel.runtime.durations import choose_frame_rate

    assert choose_frame_rate("WanVACEPipeline", {}, {}) == (16, "")
    assert choose_frame_rate("WanAnimatePipeline", {}, {}) == (30, "")
    assert choose_frame_rate("WanPipeline", {}, {"fps": 8}) == (8, "")
    rate, note = choose_frame_rate("OwnPipeline", {}, {})
    assert rate == 16
    assert "set it with --fps" in note
