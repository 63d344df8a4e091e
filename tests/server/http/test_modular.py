"""`anyaccel serve` and `anyaccel batch` with the folder of a modular pipeline: the images of `generate`."""

import base64
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import openai
import pytest
from PIL import Image

from anyaccel.generation.generate import generate
from anyaccel.generation.model_loading import release_model
from anyaccel.recipes import recipes
from tests.conftest import NEEDS_RECIPES
from tests.server.live import Live

pytestmark = [NEEDS_RECIPES, pytest.mark.filterwarnings("ignore::FutureWarning")]
CALL: dict[str, Any] = {"width": 64, "height": 64, "num_inference_steps": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    pipe: Any = recipes()["stable-diffusion-xl-modular"].make()
    pipe.save_pretrained(str(folder), overwrite_modular_index=True)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    image = generate("a red fox", folder, device="cpu", dtype="float32", seed=7, **CALL)[0]
    release_model()
    return numpy.asarray(image)


def encode(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def test_serve(folder: Path, expected: Any, tmp_path: Path) -> None:
    live = Live(tmp_path, str(folder), "--device", "cpu", "--dtype", "float32", "--sizes", "64x64")
    try:
        client: Any = live.openai()
        body: dict[str, Any] = {"seed": 7, "num_inference_steps": 2}
        response = client.images.generate(prompt="a red fox", size="64x64", response_format="b64_json", extra_body=body)
        image = Image.open(io.BytesIO(base64.b64decode(response.data[0].b64_json)))
        assert numpy.array_equal(numpy.asarray(image.convert("RGB")), expected)
        for scale, is_same in ((3, False), (None, True)):
            body["guidance_scale"] = scale
            response = client.images.generate(prompt="a red fox", size="64x64", extra_body=body)
            image = Image.open(io.BytesIO(base64.b64decode(response.data[0].b64_json)))
            assert numpy.array_equal(numpy.asarray(image.convert("RGB")), expected) == is_same
        with pytest.raises(openai.BadRequestError, match="does not support the task 'edit'"):
            client.images.edit(image=("a.png", encode(Image.new("RGB", (64, 64)))), prompt="a fox", size="64x64")
        model = client.models.list().data[0]
        assert model.id
    finally:
        live.end()


def test_batch(folder: Path, expected: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "a red fox", "seed": 7, **CALL}, {"prompt": "a red fox", "seed": 7, **CALL, "guidance_scale": 3}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ["--model", str(folder), "--device", "cpu", "--dtype", "float32", "--rows-per-call", "1"]
    command = [sys.executable, "-m", "anyaccel", "batch", str(tmp_path / "rows.jsonl"), "-o", str(tmp_path / "out")]
    subprocess.run([*command, *options], check=True, capture_output=True)
    manifest = [json.loads(line) for line in (tmp_path / "out" / "manifest.jsonl").read_text().splitlines()]
    assert len(manifest) == 2
    files = sorted((tmp_path / "out" / "images").iterdir())
    same = [numpy.array_equal(numpy.asarray(Image.open(file)), expected) for file in files]
    assert sorted(same) == [False, True], "the guidance scale of a row does not affect the other row"
