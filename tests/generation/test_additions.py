"""`anyaccel.generate` with LoRAs, IP-Adapters, ControlNets and schedulers: the results of stock diffusers."""

from pathlib import Path
from typing import Any

import numpy
import pytest

from anyaccel.emulator.run_forked import run_forked
from anyaccel.errors import ModelError, UsageError
from anyaccel.generation.adapters import parse_adapter
from anyaccel.generation.generate import generate
from anyaccel.generation.media_format import read_metadata
from tests.conftest import NEEDS_RECIPES
from tests.generation.adapter_files import save_controlnet, save_ip_adapter, save_lora
from tests.generation.models import CPU, LIBRARY, call_pipe, call_stock, make_image, make_mask, pixels, save_model

pytestmark = [
    NEEDS_RECIPES,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`"),  # of stock diffusers with two LoRAs
]
SD, IP = "stable-diffusion", "ip-adapter-base"


def load_stock(model: str) -> Any:
    return LIBRARY.DiffusionPipeline.from_pretrained(model)


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_lora(tmp_path_factory.mktemp("lora") / "style.safetensors")


@pytest.fixture(scope="module")
def controlnet(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_controlnet(tmp_path_factory.mktemp("controlnet"))


@pytest.fixture(scope="module")
def ip_adapter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_ip_adapter(tmp_path_factory.mktemp("ip") / "ip-adapter.safetensors")


def test_lora_with_its_weight(lora: str, tmp_path: Path) -> None:
    model, second = save_model(SD), save_lora(tmp_path / "second.safetensors", seed=5)
    plain = pixels(generate("a red fox", model, **CPU)[0])
    result = generate("a red fox", model, lora=[f"{lora}:0.5", (second, 0.25)], **CPU)
    pipe = load_stock(model)
    pipe.load_lora_weights(lora, adapter_name="a")
    pipe.load_lora_weights(second, adapter_name="b")
    pipe.set_adapters(["a", "b"], [0.5, 0.25])
    assert numpy.array_equal(pixels(result[0]), pixels(call_pipe(pipe).images[0]))
    assert not numpy.array_equal(pixels(result[0]), plain)
    assert result.timings.load_s == 0, "the model is not loaded again"
    assert numpy.array_equal(pixels(generate("a red fox", model, **CPU)[0]), plain), "the LoRAs are removed"
    (file,) = result.save(tmp_path / "fox.png")
    again = generate(**read_metadata(file)[0].arguments())
    assert numpy.array_equal(pixels(again[0]), pixels(result[0]))
    Path(second).write_bytes(Path(lora).read_bytes())
    with pytest.raises(UsageError, match=r"second\.safetensors, with which the image was generated, has changed"):
        read_metadata(file)[0].arguments()


def test_controlnet(controlnet: str) -> None:
    model, control = save_model(SD), make_image(4)
    net = LIBRARY.ControlNetModel.from_pretrained(controlnet)
    base = load_stock(model)
    result = generate("a red fox", model, controlnet=controlnet, control_image=control, **CPU)
    expected = call_pipe(LIBRARY.AutoPipelineForText2Image.from_pipe(base, controlnet=net), image=control)
    assert numpy.array_equal(pixels(result[0]), pixels(expected.images[0]))
    inputs: dict[str, Any] = {
        "image": make_image(),
        "mask_image": make_mask(),
        "control_image": control,
        "strength": 1.0,
    }
    result = generate("a red fox", model, controlnet=controlnet, **inputs, **CPU)
    expected = call_pipe(LIBRARY.AutoPipelineForInpainting.from_pipe(base, controlnet=net), **inputs)
    assert numpy.array_equal(pixels(result[0]), pixels(expected.images[0]))
    assert result.metadata[0].pipeline == "StableDiffusionControlNetInpaintPipeline"
    with pytest.raises(UsageError, match="1 of --control-model requires 1 of --control, not 2"):
        generate("a red fox", model, controlnet=controlnet, control_image=[control, control], **CPU)
    with pytest.raises(UsageError, match="a ControlNet requires an image"):
        generate("a red fox", model, controlnet=controlnet, **CPU)


def test_ip_adapter(ip_adapter: str) -> None:
    model, image, control = save_model(IP), make_image(6, 32), make_image(7, 32)
    base = load_stock(model)
    result = generate("a red fox", model, ip_adapter=f"{ip_adapter}:0.7", ip_adapter_image=image, **CPU)
    path = Path(ip_adapter)
    base.load_ip_adapter(str(path.parent), subfolder="", weight_name=path.name, image_encoder_folder=None)
    base.set_ip_adapter_scale(0.7)
    expected = call_pipe(base, ip_adapter_image=image)
    assert numpy.array_equal(pixels(result[0]), pixels(expected.images[0]))
    several = generate("a red fox", model, ip_adapter=f"{ip_adapter}:0.7", ip_adapter_image=[image, control], **CPU)
    expected = call_pipe(base, ip_adapter_image=[[image, control]])
    assert numpy.array_equal(pixels(several[0]), pixels(expected.images[0]))
    with pytest.raises(UsageError, match="2 of --ip-adapter require 2 of --ip-image, not 1"):
        generate("a red fox", model, ip_adapter=[ip_adapter, ip_adapter], ip_adapter_image=image, **CPU)
    with pytest.raises(UsageError, match="an IP-Adapter requires an image"):
        generate("a red fox", model, ip_adapter=ip_adapter, **CPU)


@pytest.mark.parametrize(
    ("name", "kind", "changes"),
    [
        ("euler", "EulerDiscreteScheduler", {}),
        ("DPM++2M-Karras", "DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
        ("UniPCMultistepScheduler", "UniPCMultistepScheduler", {}),
        ("lcm", "LCMScheduler", {}),
    ],
)
def test_scheduler(name: str, kind: str, changes: dict[str, Any]) -> None:
    model = save_model(SD)
    result = generate("a red fox", model, scheduler=name, **CPU)
    pipe = load_stock(model)
    pipe.scheduler = getattr(LIBRARY, kind).from_config(pipe.scheduler.config, **changes)
    assert numpy.array_equal(pixels(result[0]), pixels(call_pipe(pipe).images[0]))
    assert result.metadata[0].scheduler == kind
    again = generate(**result.metadata[0].arguments())
    assert numpy.array_equal(pixels(again[0]), pixels(result[0]))
    plain = generate("a red fox", model, **CPU)
    assert numpy.array_equal(pixels(plain[0]), pixels(call_stock(model).images[0]))


def test_all_additions_together(lora: str, controlnet: str) -> None:
    model, control = save_model(SD), make_image(4)
    inputs: dict[str, Any] = {"image": make_image(), "control_image": control, "strength": 0.6}
    result = generate("a red fox", model, lora=lora, controlnet=controlnet, scheduler="ddim", **inputs, **CPU)
    pipe = load_stock(model)
    pipe.load_lora_weights(lora)
    pipe.scheduler = LIBRARY.DDIMScheduler.from_config(pipe.scheduler.config)
    net = LIBRARY.ControlNetModel.from_pretrained(controlnet)
    expected = call_pipe(LIBRARY.AutoPipelineForImage2Image.from_pipe(pipe, controlnet=net), **inputs)
    assert numpy.array_equal(pixels(result[0]), pixels(expected.images[0]))
    assert [item["kind"] for item in result.metadata[0].adapters] == ["lora", "controlnet"]
    assert generate(**{**result.metadata[0].arguments(["image", "control_image"]), **inputs})[0] == result[0]


def test_additions_on_a_virtual_device(lora: str, controlnet: str) -> None:
    model = save_model(SD)
    call: dict[str, Any] = {"lora": f"{lora}:0.5", "controlnet": controlnet, "scheduler": "euler"}
    call |= {"image": make_image(), "control_image": make_image(4), "strength": 0.6}
    expected = pixels(generate("a red fox", model, **CPU, **call)[0]).astype(int)

    def use(_: Any) -> Any:
        return pixels(generate("a red fox", model, **{**CPU, "device": "neuron"}, **call)[0]).astype(int)

    assert numpy.abs(run_forked("neuron", use) - expected).max() <= 2


@pytest.mark.parametrize(
    ("text", "source", "weight"),
    [
        ("org/name", "org/name", 1.0),
        ("org/name:0.8", "org/name", 0.8),
        ("org/name/file.safetensors:-1", "org/name/file.safetensors", -1.0),
        ("org/name/models/sub/file.safetensors:.5", "org/name/models/sub/file.safetensors", 0.5),
    ],
)
def test_hub_adapters(text: str, source: str, weight: float) -> None:
    adapter = parse_adapter("lora", text)
    assert (adapter.source, adapter.weight, adapter.sha256) == (source, weight, None)


def test_paths_with_colons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.safetensors", "b:0.5", "C:x.safetensors"):
        Path(name).write_bytes(b"x")
    assert parse_adapter("lora", "a.safetensors:0.5").weight == 0.5
    existing = parse_adapter("lora", "b:0.5")
    assert (existing.source, existing.weight) == (str(tmp_path / "b:0.5"), 1.0)
    assert parse_adapter("lora", "b:0.5:2").weight == 2
    drive = parse_adapter("lora", "C:x.safetensors:0.5")
    assert (drive.source, drive.weight) == (str(tmp_path / "C:x.safetensors"), 0.5)
    with pytest.raises(UsageError, match=r"C:\\lora\.safetensors of --lora does not exist"):
        parse_adapter("lora", "C:\\lora.safetensors:0.5")
    with pytest.raises(UsageError, match="C:0"):
        parse_adapter("lora", "C:0")


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ({"lora": "missing.safetensors"}, r"missing\.safetensors of --lora does not exist", "Hub ID"),
        ({"lora": "a.safetensors:nan"}, "must be finite", "--lora FILE:0.8"),
        ({"scheduler": "eulr"}, "unknown scheduler 'eulr'", "did you mean euler"),
        ({"scheduler": "FlowMatchEulerDiscreteScheduler"}, "cannot replace the model's PNDMScheduler", "known: "),
        ({"controlnet": ".", "control_image": make_image()}, "has no config.json", "ControlNet"),
    ],
)
def test_unsuitable_additions_are_rejected(arguments: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        generate("a red fox", save_model(SD), **CPU, **arguments)
    assert hint in caught.value.hint


def test_pipelines_without_support(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"x")
    for argument, message in (("lora", "does not support LoRA"), ("ip_adapter", "does not support IP-Adapters")):
        call: dict[str, Any] = {argument: str(tmp_path / "a.safetensors")}
        with pytest.raises(UsageError, match=message):
            generate("a red fox", save_model("stable-audio"), **CPU, **call)
    with pytest.raises(UsageError, match="FlowMatchEulerDiscreteScheduler"):
        generate("a red fox", save_model("flux-2-klein"), scheduler="ddim", **CPU)


def test_damaged_lora_is_an_error_and_the_model_stays_usable(lora: str, tmp_path: Path) -> None:
    model, damaged = save_model(SD), tmp_path / "damaged.safetensors"
    expected = pixels(generate("a red fox", model, **CPU)[0])
    damaged.write_bytes(Path(lora).read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"damaged\.safetensors"):
        generate("a red fox", model, lora=damaged, **CPU)
    assert numpy.array_equal(pixels(generate("a red fox", model, **CPU)[0]), expected)
