"""Served models with several input images, pipeline arguments, ControlNets, IP-Adapters, speed levels and audio."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from anyaccel.media.types import Audio
from anyaccel.recipes import recipes
from anyaccel.recipes.parts.language_models import qwen_3
from anyaccel.server.http.errors import ApiError
from anyaccel.server.http.image_request import EditRequest, ImageRequest, make_job_spec
from anyaccel.server.http.input_files import check_input_files
from anyaccel.server.settings import ServedName, ServerLimits, ServerSettings
from anyaccel.server.worker.denoise_progress import StepObserver
from anyaccel.server.worker.job_inputs import read_inputs
from anyaccel.server.worker.job_spec import JobSpec
from anyaccel.server.worker.result_files import encode_result
from anyaccel.server.worker.served_model import ServedModel
from tests.conftest import NEEDS_RECIPES
from tests.generation.adapter_files import save_ip_adapter
from tests.generation.models import save_model as save_generation_model

pytestmark = [NEEDS_RECIPES, pytest.mark.filterwarnings("ignore::FutureWarning")]
SIZE = 32


def make_png(color: str, size: int = SIZE) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (size, size), color).save(stream, "PNG")
    return stream.getvalue()


def save_model(name: str, folder: Path) -> Path:
    pipe: Any = recipes()[name].make()
    pipe.save_pretrained(folder / name)
    return folder / name


def serve(folder: Path, **options: Any) -> ServedModel:
    settings = ServerSettings(
        models=(ServedName("tiny", str(folder)),), data=folder, device="cpu", dtype="float32",
        **{"sizes": ((SIZE, SIZE),), **options},
    )  # fmt: skip
    return ServedModel(settings.models[0], settings)


def generate(model: ServedModel, spec: JobSpec, **inputs: bytes) -> Any:
    named = {name.replace("_1", ".1"): content for name, content in inputs.items()}
    media, _ = model.generate(spec, 0, read_inputs(named), StepObserver(lambda done, total: None))
    return numpy.asarray(media).astype(int) if isinstance(media, Image.Image) else media


def differs(first: Any, second: Any) -> bool:
    return bool(abs(first - second).max() > 1)


@pytest.mark.long
def test_an_edit_with_several_images_and_pipeline_arguments(tmp_path: Path) -> None:
    pipe: Any = recipes()["flux-2-klein"].make()
    pipe.register_modules(text_encoder=qwen_3(num_hidden_layers=28))  # by default, its layers 9, 18 and 27 are used
    pipe.save_pretrained(tmp_path)
    model = serve(tmp_path, sizes=((64, 64),))
    facts = model.facts()
    assert (facts.kind, facts.many_images) == ("image", True)
    assert {"generate", "edit"} <= set(facts.tasks)
    arguments = facts.arguments["edit"]
    assert arguments["sigmas"] == ("array of number",)
    assert not {"latents", "prompt_embeds", "generator", "output_type", "callback_on_step_end"} & set(arguments)

    def run(sigma: float, **inputs: bytes) -> Any:
        body: dict[str, Any] = {"prompt": "a hat", "seed": 1, "num_inference_steps": 1, "sigmas": [sigma]}
        spec = make_job_spec(EditRequest(**body), "edit", {"tiny": facts}, ServerLimits(), (64, 64))
        assert spec.arguments == {"sigmas": [sigma]}
        return generate(model, spec, **inputs)

    both = run(1.0, image=make_png("red", 64), image_1=make_png("green", 64))
    assert not differs(both, run(1.0, image=make_png("red", 64), image_1=make_png("green", 64)))
    assert differs(both, run(1.0, image=make_png("red", 64))), "the second image has an effect"
    assert differs(both, run(0.5, image=make_png("red", 64), image_1=make_png("green", 64))), (
        "the argument has an effect"
    )


def test_the_arguments_of_a_pipeline_have_types(tmp_path: Path) -> None:
    facts = serve(save_model("flux", tmp_path)).facts()
    arguments = facts.arguments["generate"]
    assert (arguments["true_cfg_scale"], arguments["prompt_2"]) == (("number",), ("string", "array of string"))

    def read(**values: Any) -> Any:
        request = ImageRequest(prompt="a hat", num_inference_steps=1, **values)
        return make_job_spec(request, "generate", {"tiny": facts}, ServerLimits()).arguments

    assert read(true_cfg_scale=4, prompt_2="x") == {"true_cfg_scale": 4, "prompt_2": "x"}
    assert read(true_cfg_scale=None) == {}
    for name, value in {
        "true_cfg_scale": "4",
        "prompt_2": ["x", "y"],
        "sigmas": 1.0,
        "max_sequence_length": True,
    }.items():
        with pytest.raises(ApiError, match=f"{name} must be of type"):
            read(**{name: value})


def test_an_ip_adapter(tmp_path: Path) -> None:
    model = serve(
        Path(save_generation_model("ip-adapter-base")),
        ip_adapters=(f"{save_ip_adapter(tmp_path / 'adapter.safetensors')}:0.8",),
    )
    facts = model.facts()
    assert all("ip_adapter_image" in facts.inputs[task] for task in facts.tasks)
    request = ImageRequest(prompt="a cat", seed=1, num_inference_steps=2)
    spec = make_job_spec(request, "generate", {"tiny": facts}, ServerLimits())
    images = [generate(model, spec, ip_adapter_image=make_png(color)) for color in ("white", "black", "white")]
    assert not differs(images[0], images[2])
    assert differs(images[0], images[1])
    with pytest.raises(ApiError, match="requires the input ip_adapter_image"):
        check_input_files({}, facts, "generate")


def test_a_controlnet(tmp_path: Path) -> None:
    folder = save_model("stable-diffusion", tmp_path)
    controlnet: Any = recipes()["controlnet"].make().controlnet  # type: ignore[attr-defined]
    controlnet.save_pretrained(tmp_path / "controlnet")
    model = serve(folder, controlnets=(str(tmp_path / "controlnet"),))
    facts = model.facts()
    assert "control_image" in facts.inputs["generate"]
    assert model.max_concurrent == 1
    request = ImageRequest(prompt="a cat", seed=1, num_inference_steps=2)
    spec = make_job_spec(request, "generate", {"tiny": facts}, ServerLimits())
    images = [generate(model, spec, control_image=make_png(color)) for color in ("white", "black", "white")]
    assert not differs(images[0], images[2])
    assert differs(images[0], images[1])
    with pytest.raises(ApiError, match="requires the input control_image"):
        check_input_files({}, facts, "generate")


def test_the_default_speed_and_the_levels_of_requests(folder: Path) -> None:
    facts = replace(serve(folder).facts(), speeds=("fast", "exact"))

    def choose(quality: str | None, speeds: tuple[str, ...]) -> str | None:
        request = ImageRequest(prompt="a cat", quality=quality)
        models = {"tiny": replace(facts, speeds=speeds)}
        return make_job_spec(request, "generate", models, ServerLimits()).speed

    every = ("exact", "fast", "draft")
    assert [choose(quality, every) for quality in ("low", "medium", "high", "auto", "standard", None)] == [
        "draft", "fast", "exact", "exact", "exact", "exact",
    ]  # fmt: skip
    assert choose("medium", ("exact", "draft")) == "exact", "not faster than requested"
    assert choose(None, ("fast", "exact")) == "fast", "the first level is the default"
    assert choose("low", ("exact",)) is None, "with one level, the quality is ignored"


def test_audio(tmp_path: Path) -> None:
    model = serve(save_model("stable-audio", tmp_path), sizes=())
    facts = model.facts()
    assert (facts.kind, facts.tasks) == ("audio", ("generate",))
    assert facts.audio is not None
    assert facts.audio.sets_seconds
    spec = JobSpec(
        task="generate", model="tiny", prompt="rain", seeds=(7,), num_inference_steps=2, kind="audio", seconds=2.0,
        output_format="flac",
    )  # fmt: skip
    media, metadata = model.generate(spec, 0, {}, StepObserver(lambda done, total: None))
    assert isinstance(media, Audio)
    assert media.seconds == pytest.approx(2.0, abs=0.3)
    result = encode_result(media, spec, metadata, {}, lambda done, total: None)
    assert result.content.startswith(b"fLaC")
    assert set(result.files) == {"waveform.webp"}
    assert result.details["sampling_rate"] == media.rate == 8
