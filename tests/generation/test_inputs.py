"""`anyaccel.generate` with input images, masks, videos and audio: the results of stock diffusers."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from anyaccel.errors import UsageError
from anyaccel.generation.call_validation import map_call
from anyaccel.generation.generate import generate
from anyaccel.generation.inputs import InputMedia, assign_inputs
from anyaccel.generation.media_format import read_metadata
from anyaccel.generation.pipeline_interface import read_interface
from anyaccel.media.types import Audio, Video
from anyaccel.recipes import recipes
from tests.conftest import NEEDS_RECIPES
from tests.generation.models import CPU, LIBRARY, SIZE, call_pipe, call_stock, make_image, make_mask, pixels, save_model

pytestmark = [NEEDS_RECIPES, pytest.mark.filterwarnings("ignore::FutureWarning")]
SD = "stable-diffusion"
# Arguments of a recipe that a tiny model requires.
NEEDED = ("width", "height", "max_sequence_length", "text_encoder_out_layers")
WAN: dict[str, Any] = {"width": SIZE, "height": SIZE, "max_sequence_length": 32}


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "in.png"
    make_image().save(path)
    return path


@pytest.fixture
def mask(tmp_path: Path) -> Path:
    path = tmp_path / "mask.png"
    make_mask().save(path)
    return path


def test_image_to_image(image: Path) -> None:
    model = save_model(SD)
    expected = call_stock(model, "AutoPipelineForImage2Image", image=make_image(), strength=0.6).images[0]
    for value in (image, str(image), make_image(), pixels(make_image())):
        result = generate("a red fox", model, image=value, strength=0.6, **CPU)
        assert numpy.array_equal(pixels(result[0]), pixels(expected))
    assert result.metadata[0].pipeline == "StableDiffusionImg2ImgPipeline"
    assert result.metadata[0].unrecorded == ("image",), "an array is not a file"
    plain = generate("a red fox", model, **CPU)
    assert plain.metadata[0].pipeline == "StableDiffusionPipeline"
    assert numpy.array_equal(pixels(plain[0]), pixels(call_stock(model).images[0]))


def test_inpainting(image: Path, mask: Path) -> None:
    model = save_model(SD)
    call: dict[str, Any] = {"width": SIZE, "height": SIZE, "strength": 1.0}
    result = generate("a red fox", model, image=image, mask_image=mask, **CPU, **call)
    arguments = {"image": make_image(), "mask_image": make_mask(), **call}
    expected = call_stock(model, "AutoPipelineForInpainting", **arguments).images[0]
    assert numpy.array_equal(pixels(result[0]), pixels(expected))


def test_several_images_of_an_edit_pipeline(image: Path, tmp_path: Path) -> None:
    model, second = save_model("flux-2-klein"), tmp_path / "second.png"
    make_image(0, 64).save(image)  # the smallest size that the pipeline accepts
    make_image(1, 64).save(second)
    call: dict[str, Any] = {name: value for name, value in recipes()["flux-2-klein"].call().items() if name in NEEDED}
    result = generate("a red fox", model, image=[image, second], **CPU, **call)
    expected = call_stock(model, image=[make_image(0, 64), make_image(1, 64)], **call).images[0]
    assert numpy.array_equal(pixels(result[0]), pixels(expected))
    assert [item["path"] for item in result.metadata[0].inputs] == [str(image), str(second)]
    small = make_image()
    with pytest.raises(UsageError, match="Flux2KleinPipeline rejected the call: Image too small"):
        generate("a red fox", model, image=small, **CPU, **call)
    with pytest.raises(UsageError, match="takes one image as image, not 2"):
        generate("a red fox", save_model(SD), image=[image, second], **CPU)


def test_several_images_of_a_model_without_an_edit_pipeline_of_its_own(image: Path, tmp_path: Path) -> None:
    """One class of Qwen-Image 2.1 generates and edits."""
    model, second = save_model("qwen-image-2-1"), tmp_path / "second.png"
    make_image(0, 64).save(image)
    make_image(1, 64).save(second)
    call: dict[str, Any] = {"true_cfg_scale": 2.0, "negative_prompt": "blue", "output_resolution": 64}
    result = generate("a red fox", model, image=[image, second], **CPU, **call)
    expected = call_stock(model, image=[make_image(0, 64), make_image(1, 64)], **call).images[0]
    assert numpy.array_equal(pixels(result[0]), pixels(expected))
    one = call_stock(model, image=make_image(0, 64), **call).images[0]
    assert not numpy.array_equal(pixels(result[0]), pixels(one))


def test_the_images_that_a_pipeline_gets() -> None:
    def assign(pipeline: str, count: int) -> Any:
        images = [InputMedia(kind="image", media=make_image(seed)) for seed in range(count)]
        return assign_inputs(pipeline, ("prompt", "image"), (), {"image": images})["image"]

    assert len(assign("ZImageOmniPipeline", 3)) == 3
    assert not isinstance(assign("QwenImageEditPlusPipeline", 1), list)
    assert isinstance(assign("GlmImagePipeline", 1), list), "it fails with a single image"
    for pipeline in ("FluxKontextPipeline", "QwenImageEditPipeline", "LTXConditionPipeline"):
        with pytest.raises(UsageError, match="takes one image as image, not 2") as caught:
            assign(pipeline, 2)  # diffusers raises a shape error, or ignores the second image
        assert "takes several images, such as" in caught.value.hint


def test_image_to_video(image: Path) -> None:
    model = save_model("wan-image-to-video")
    call: dict[str, Any] = {**WAN, **read_embeds("wan-image-to-video")}
    result = generate(None, model, image=image, frames=5, **CPU, **call)
    stock = call_stock(model, prompt=None, num_frames=5, image=make_image(), output_type="pil", **call)
    assert numpy.array_equal(pixels(result.videos[0].frames), pixels(stock.frames[0]))
    with pytest.raises(UsageError, match="requires image") as caught:
        generate(None, model, frames=5, **CPU, **call)
    assert "--image PATH" in caught.value.hint


def test_image_of_a_text_to_video_model(image: Path) -> None:
    """Diffusers' auto pipelines do not list LTX-2; its image-to-video pipeline has the same components."""
    model = save_model("ltx-2")
    call: dict[str, Any] = {
        "width": 32, "height": 32, "max_sequence_length": 16, "spatio_temporal_guidance_blocks": [1], "image_crf": 0,
    }  # fmt: skip
    result = generate("a red fox", model, image=image, frames=5, **CPU, **call)
    expected = call_stock(
        model, "LTX2ImageToVideoPipeline", image=make_image(), num_frames=5, output_type="pil", **call
    )
    assert numpy.array_equal(pixels(result.videos[0].frames), pixels(expected.frames[0]))
    with pytest.raises(UsageError, match="generates videos from text only"):
        generate("a red fox", save_model("wan"), image=image, **CPU, **WAN)


def read_embeds(recipe: str) -> dict[str, Any]:
    """Return the prompt embeddings of a recipe: these pipelines clean prompts with ftfy, which may not be installed."""
    call = recipes()[recipe].call()
    return {name: call[name] for name in ("prompt_embeds", "negative_prompt_embeds")}


def test_video_to_video(tmp_path: Path) -> None:
    model, frames = save_model("wan-video-to-video"), [make_image(seed) for seed in range(5)]
    folder = tmp_path / "frames"
    folder.mkdir()
    for index, frame in enumerate(frames):
        frame.save(folder / f"{index}.png")
    call: dict[str, Any] = {**WAN, **read_embeds("wan-video-to-video"), "strength": 1.0}
    expected = call_stock(model, prompt=None, video=frames, output_type="pil", **call).frames[0]
    for value in (folder, frames, Video(frames, 16)):
        result = generate(None, model, video=value, **CPU, **call)
        assert numpy.array_equal(pixels(result.videos[0].frames), pixels(expected))


def test_audio_input_of_a_text_to_audio_model() -> None:
    model = save_model("stable-audio-3")
    audio: torch.Tensor = recipes()["stable-audio-3-audio-to-audio"].call()["audio"]
    pipe = LIBRARY.StableAudio3AudioToAudioPipeline.from_pretrained(model)
    rate = pipe.vae.config.sampling_rate
    call: dict[str, Any] = {"init_noise_level": 0.5}
    result = generate("a red fox", model, audio=Audio(audio[0].numpy(), rate), seconds=2, **CPU, **call)
    expected = call_pipe(pipe, audio=audio, duration=2.0, **call).audios[0].numpy()
    assert numpy.array_equal(result.audios[0].samples, expected)
    assert result.metadata[0].pipeline == "StableAudio3AudioToAudioPipeline"


@pytest.mark.parametrize(
    ("recipe", "pipeline"), [("stable-audio", "StableAudioPipeline"), ("ace-step", "AceStepPipeline")]
)
def test_audio_is_converted_to_the_rate_of_the_model(recipe: str, pipeline: str) -> None:
    model = save_model(recipe)
    pipe = getattr(LIBRARY, pipeline).from_pretrained(model)
    rate = pipe.vae.config.sampling_rate
    time = numpy.arange(20 * rate) / rate
    tone = numpy.stack([numpy.sin(2 * numpy.pi * time)] * 2).astype(numpy.float32)
    call = {"audio": InputMedia(kind="audio", media=Audio(tone[:, ::2].copy(), rate // 2))}
    arguments = map_call(read_interface(pipe), call, prompt=True)
    converted = next(value for name, value in arguments.items() if isinstance(value, torch.Tensor))
    assert converted.shape[-2:] == tone.shape
    assert abs(converted.numpy().reshape(tone.shape) - tone)[:, 4 * rate : -4 * rate].max() < 0.02
    assert arguments.get("initial_audio_sampling_rate", rate) == rate


def test_pipeline_without_a_prompt() -> None:
    model = save_model("ddpm")
    result = generate(model=model, **CPU)
    assert numpy.array_equal(pixels(result[0]), pixels(call_stock(model, prompt=None).images[0]))
    with pytest.raises(UsageError, match="DDPMPipeline does not accept a prompt"):
        generate("a red fox", model, **CPU)
    with pytest.raises(UsageError, match="missing prompt"):
        generate(model=save_model(SD), **CPU)


def test_metadata_names_the_inputs_and_changed_files_are_rejected(image: Path, tmp_path: Path) -> None:
    result = generate("a red fox", save_model(SD), image=image, strength=0.6, **CPU)
    (file,) = result.save(tmp_path / "fox.png")
    (metadata,) = read_metadata(file)
    assert [(item["name"], item["kind"], item["path"]) for item in metadata.inputs] == [("image", "image", str(image))]
    again = generate(**metadata.arguments())
    assert numpy.array_equal(pixels(again[0]), pixels(result[0]))
    make_image(1).save(image)
    with pytest.raises(UsageError, match=r"the input \S+in\.png of the image has changed since then") as caught:
        metadata.arguments()
    assert "--image" in caught.value.hint
    image.unlink()
    with pytest.raises(UsageError, match=r"in\.png of the image does not exist any more"):
        metadata.arguments()
    assert "image" not in metadata.arguments(replaced=["image"])


@pytest.mark.parametrize(
    ("recipe", "call", "message", "hint"),
    [
        (SD, {"image": "missing.png"}, r"missing\.png of --image does not exist", "path"),
        (SD, {"image": "https://example.com/a.png"}, "--image is a URL", "download it"),
        (SD, {"image": []}, "image is an empty list", "--image"),
        (SD, {"video": [make_image()]}, "does not take video, and diffusers has no pipeline", "--video"),
        (SD, {"control_image": make_image()}, "without a ControlNet", "--control-model"),
        (SD, {"ip_adapter_image": make_image()}, "requires the IP-Adapter", "--ip-adapter"),
        (SD, {"mask_image": make_mask()}, "requires image", "--image PATH"),
        (SD, {"seconds": 3}, "no argument for the duration", "omit --seconds"),
        (SD, {"frames": 3}, "no argument for the number of frames", "omit --frames"),
        ("stable-audio", {"image": make_image()}, "does not take image", "--image"),
        ("llada-2", {}, "not images, video or audio", "Python"),
    ],
)
def test_unsuitable_inputs_are_rejected(recipe: str, call: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        generate("a red fox", save_model(recipe), **CPU, **call)
    assert hint in caught.value.hint
