"""LoRA adapters at run time, pipeline arguments and the description of the API, with a tiny Stable Diffusion model."""

import base64
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy
import openai
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from selenium.webdriver import Chrome

from anyaccel.recipes import recipes
from tests.browser import open_browser, read_errors
from tests.conftest import NEEDS_RECIPES
from tests.server.live import Live
from tests.server.page import Page

pytestmark = [NEEDS_RECIPES, pytest.mark.long]


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a LoRA, and with files that must not be loaded."""
    from diffusers.utils.state_dict_utils import convert_state_dict_to_diffusers
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    folder = tmp_path_factory.mktemp("loras")
    pipe: Any = recipes()["stable-diffusion"].make()
    pipe.unet.add_adapter(LoraConfig(r=2, lora_alpha=8, target_modules=["to_q", "to_v"]))
    for name, parameter in pipe.unet.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    convert: Any = convert_state_dict_to_diffusers
    weights = convert(get_peft_model_state_dict(pipe.unet))
    pipe.save_lora_weights(folder, unet_lora_layers=weights, weight_name="ink.v1.safetensors")
    other = {
        name: torch.zeros(3, 5) for name in ("unet.down_blocks.0.lora_A.weight", "unet.down_blocks.0.lora_B.weight")
    }
    save_file(other, folder / "other-model.safetensors")
    save_file({"weight": torch.zeros(2)}, folder / "model.safetensors")
    (folder / "damaged.safetensors").write_bytes(b"\xff" * 100)
    (folder / "pickled.bin").write_bytes(b"\x80\x04.")
    outside = tmp_path_factory.mktemp("private") / "secret.safetensors"
    outside.write_bytes((folder / "ink.v1.safetensors").read_bytes())
    (folder / "link.safetensors").symlink_to(outside)
    return folder


@pytest.fixture(scope="module")
def service(loras: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    live = Live(
        tmp_path_factory.mktemp("data"), f"tiny={folder}", "--device", "cpu", "--dtype", "float32", "--sizes", "64x64",
        "--lora-dir", str(loras),
    )  # fmt: skip
    yield live
    assert live.end() == 0


def generate(live: Live, **extra: Any) -> Any:
    response = live.openai().images.generate(prompt="a cat", extra_body={"seed": 7, "num_inference_steps": 4, **extra})
    assert response.data is not None
    image = Image.open(io.BytesIO(base64.b64decode(response.data[0].b64_json or "")))
    return numpy.asarray(image.convert("RGB")).astype(int)


def test_a_lora_is_added_used_and_removed(service: Live, loras: Path) -> None:
    plain = generate(service)
    with service.http() as http:
        listed = http.get("/v1/loras").json()
        assert (listed["data"], listed["available"]) == ([], ["damaged", "ink.v1", "model", "other-model"])
        with pytest.raises(openai.BadRequestError, match="unknown LoRA"):
            generate(service, lora="ink.v1")
        added = http.post("/v1/loras", json={"name": "ink.v1"}).json()
        assert added == {"id": "ink.v1", "object": "lora", "models": ["tiny"], "added": True}
        with_lora = generate(service, lora="ink.v1")
        assert abs(with_lora - plain).max() > 5
        assert abs(generate(service) - plain).max() <= 1
        assert abs(generate(service, lora="ink.v1", lora_scale=0) - plain).max() <= 1
        assert abs(generate(service, lora="ink.v1") - with_lora).max() <= 1
        assert http.get("/v1/models").json()["data"][0]["loras"] == ["ink.v1"]
        assert (service.data / "loras.json").read_text() == '{"tiny": ["ink.v1"]}', "it is added again after a restart"
        assert http.delete("/v1/loras/ink.v1").json()["deleted"] is True
        assert http.delete("/v1/loras/ink.v1").status_code == 404
        assert http.get("/v1/loras").json()["data"] == []
        assert (loras / "ink.v1.safetensors").exists()


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    with open_browser() as chrome:
        yield chrome


def test_the_page_offers_loras_without_a_reload(service: Live, browser: Chrome) -> None:
    page = Page(browser, service)
    page.load()
    page.wait_for("document.getElementById('model').options.length")
    page.run("for (const id of ['settings', 'more']) document.getElementById(id).open = true")
    page.run("document.getElementById('prompt').value = 'a fox'")
    assert not page.find("#lora-field").is_displayed()
    with service.http() as http:
        http.post("/v1/loras", json={"name": "ink.v1"})
        page.wait_for("document.querySelector('#lora option[value=\"ink.v1\"]')")
        page.select("lora", "ink.v1")
        assert page.find("#lora-scale-field").is_displayed()
        http.post("/v1/loras", json={"name": "other-model"})
        page.wait_for("document.getElementById('lora').options.length === 3")
        assert page.run("return document.getElementById('lora').value") == "ink.v1", "the selection is kept"
        assert page.run("return document.getElementById('prompt').value") == "a fox"
        for name in ("ink.v1", "other-model"):
            http.delete(f"/v1/loras/{name}")
        page.wait_for("document.getElementById('lora-field').hidden")
    assert not page.find("#lora-scale-field").is_displayed()
    assert read_errors(browser) == []


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("../secret", 404), ("/etc/passwd", 404), ("link", 404), ("pickled", 404), ("none", 404), (".", 404),
        ("damaged", 400), ("model", 400),
    ],
)  # fmt: skip
def test_only_loras_in_the_folder_are_added(service: Live, name: str, status: int) -> None:
    with service.http() as http:
        response = http.post("/v1/loras", json={"name": name})
    assert (response.status_code, response.json()["error"]["code"]) == (status, "invalid_lora")


def test_a_lora_of_another_model_fails_the_request_only(service: Live) -> None:
    plain = generate(service)
    with service.http() as http:
        assert http.post("/v1/loras", json={"name": "other-model"}).status_code == 200
        with pytest.raises(openai.BadRequestError, match="other-model"):
            generate(service, lora="other-model")
        http.delete("/v1/loras/other-model")
    assert abs(generate(service) - plain).max() <= 1


def test_pipeline_arguments_are_checked_and_used(service: Live) -> None:
    plain = generate(service)
    assert abs(generate(service, guidance_rescale=0.0) - plain).max() <= 1
    assert abs(generate(service, guidance_rescale=0.9) - plain).max() > 1
    stream = io.BytesIO()
    Image.new("RGB", (64, 64), "grey").save(stream, "PNG")
    # Form fields are texts.
    edited = service.openai().images.edit(
        image=("a.png", stream.getvalue()), prompt="a cat", extra_body={"eta": 0.5, "num_inference_steps": 4}
    )
    assert edited.data is not None
    invalid: dict[str, Any] = {
        "guidance_rescale": "high", "clip_skip": 1.5, "timesteps": [1] * 1000, "eta": 1e9, "callback_on_step_end": 1,
        "prompt_embeds": [1.0], "num_images_per_prompt": 4, "cross_attention_kwargs": {"scale": 1}, "output_type": "pt",
        "ip_adapter_image": "http://x",
    }  # fmt: skip
    for name, value in invalid.items():
        with pytest.raises(openai.BadRequestError) as caught:
            generate(service, **{name: value})
        assert caught.value.param == name
    with pytest.raises(openai.BadRequestError, match="IndexError"):  # the pipeline does not check it
        generate(service, clip_skip=100)
    with pytest.raises(openai.BadRequestError, match="empty array"):
        generate(service, timesteps=[])
    with pytest.raises(openai.BadRequestError, match="accepts one image"):
        service.openai().images.edit(image=[stream.getvalue()] * 2, prompt="a cat")


def test_the_description_of_the_api_works_offline(service: Live) -> None:
    with service.http() as http:
        page = http.get("/docs")
        assert page.status_code == 200
        for path in http.get("/openapi.json").json()["paths"]:
            assert path in page.text
        assert "true_cfg_scale" not in page.text
        links = re.findall(r'(?:href|src)="([^"]+)"', page.text)
        assert links == ["/docs.css", "/openapi.json"], "no other origins"
        assert "<script" not in page.text
        assert all(http.get(link).status_code == 200 for link in links)
    assert httpx.get(f"{service.address}/docs", timeout=60).status_code == 200
