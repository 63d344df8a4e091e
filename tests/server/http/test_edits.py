"""Edits with several images and a mask, and several speed levels, with OpenAI's client and tiny models."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import openai
import pytest
from PIL import Image

from anyaccel.recipes import recipes
from anyaccel.recipes.parts.language_models import qwen_3
from tests.conftest import NEEDS_RECIPES
from tests.server.live import Live

pytestmark = [NEEDS_RECIPES, pytest.mark.long]
SIDE = 64


@pytest.fixture(scope="module")
def service(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    klein = tmp_path_factory.mktemp("klein")
    pipe: Any = recipes()["flux-2-klein"].make()
    pipe.register_modules(text_encoder=qwen_3(num_hidden_layers=28))  # by default, its layers 9, 18 and 27 are used
    pipe.save_pretrained(klein)
    live = Live(
        tmp_path_factory.mktemp("data"), f"klein={klein}", f"sd={folder}", "--device", "cpu", "--dtype", "float32",
        "--sizes", f"{SIDE}x{SIDE}", "--speed", "exact", "--speed", "draft",
    )  # fmt: skip
    yield live
    assert live.end() == 0


def make_png(color: str, side: int = SIDE, mode: str = "RGB") -> tuple[str, bytes]:
    stream = io.BytesIO()
    Image.new(mode, (side, side), color).save(stream, "PNG")
    return f"{color}.png", stream.getvalue()


def make_mask() -> tuple[str, bytes]:
    """Return a mask of which only the right half changes."""
    mask = Image.new("L", (SIDE, SIDE), "black")
    mask.paste("white", (SIDE // 2, 0, SIDE, SIDE))
    stream = io.BytesIO()
    mask.save(stream, "PNG")
    return "mask.png", stream.getvalue()


def edit(live: Live, image: Any, model: str = "klein", **call: Any) -> Any:
    body = {"seed": 1, "num_inference_steps": 2, "strength": 0.9} if "mask" in call else {"seed": 1}
    response = live.openai().images.edit(
        image=image,
        prompt="a hat",
        model=model,
        size=f"{SIDE}x{SIDE}",
        extra_body={"num_inference_steps": 2, **body},
        **call,
    )
    assert response.data is not None
    content = base64.b64decode(response.data[0].b64_json or "")
    return numpy.asarray(Image.open(io.BytesIO(content)).convert("RGB")).astype(int)


def test_an_edit_with_two_images(service: Live) -> None:
    both = edit(service, [make_png("red"), make_png("green", 96)])
    assert abs(both - edit(service, [make_png("red"), make_png("green", 96)])).max() <= 1
    assert abs(both - edit(service, [make_png("red")])).max() > 1
    assert abs(both - edit(service, [make_png("green", 96), make_png("red")])).max() > 1, "the order matters"


def test_an_edit_with_two_images_and_a_mask(service: Live) -> None:
    """The first image is edited where the mask is white; the second one is a reference."""
    plain, with_reference, with_other = (
        edit(service, images, mask=make_mask())
        for images in (
            make_png("red"), [make_png("red"), make_png("green", 96)], [make_png("red"), make_png("blue", 96)],
        )
    )  # fmt: skip
    assert plain.shape == with_reference.shape == (SIDE, SIDE, 3)
    assert abs(plain - with_reference).max() > 1
    assert abs(with_other - with_reference).max() > 1
    with pytest.raises(openai.BadRequestError, match="takes one image"):
        edit(service, [make_png("red")] * 3, mask=make_mask())


def test_the_quality_selects_a_speed_level(service: Live) -> None:
    call: dict[str, Any] = {"prompt": "a cat", "model": "sd", "num_inference_steps": 10, "seed": 3}
    with service.http() as http:
        assert http.get("/v1/models").json()["data"][1]["speeds"] == ["exact", "draft"]
        images, speeds = {}, {}
        for quality in ("high", "medium", "low", None):
            job = http.post("/v1/jobs", json={**call, **({"quality": quality} if quality else {})}).json()["id"]
            done = service.wait_state(http, job, "done", "failed")
            speeds[quality] = done["request"]["speed"]
            images[quality] = http.get(done["images"][0]["url"]).content
    assert speeds == {"high": "exact", "medium": "exact", "low": "draft", None: "exact"}
    pixels = {
        name: numpy.asarray(Image.open(io.BytesIO(content)).convert("RGB")).astype(int)
        for name, content in images.items()
    }
    assert abs(pixels["high"] - pixels["medium"]).max() <= 1
    assert abs(pixels["high"] - pixels["low"]).max() > 1, "draft changes the image"
