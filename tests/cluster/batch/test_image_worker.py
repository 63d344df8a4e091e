"""A worker's own work: rows of one shape in one call, and each by itself where that fails."""

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageChops

from anyaccel.cluster.batch.image_worker import ImageWorker, RowFailed, RowImage, WorkerSettings
from anyaccel.cluster.batch.rows import BatchRow
from anyaccel.generation.image_format import read_metadata


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> ImageWorker:
    from anyaccel.recipes import recipes

    place = tmp_path_factory.mktemp("models") / "tiny"
    pipe: Any = recipes()["stable-diffusion"].make()
    pipe.save_pretrained(place)
    return ImageWorker(WorkerSettings(model=str(place), device="cpu", dtype="float32", rows_a_call=4))


def rows(**call: Any) -> list[BatchRow]:
    prompts = ("a cat", "a dog", "a red apple")
    return [BatchRow(number=n + 1, prompt=text, seed=10 + n, call=call) for n, text in enumerate(prompts)]


def test_rows_of_one_call_are_the_pictures_that_each_would_be_alone(maker: ImageWorker, tmp_path: Path) -> None:
    assert maker.facts.rows_a_call == 4
    asked = rows(num_inference_steps=2, negative_prompt="a boat")
    together = maker.make(asked)
    for row, made in zip(asked, together, strict=True):
        (alone,) = maker.make([row])
        assert isinstance(made, RowImage)
        assert isinstance(alone, RowImage)
        pictures = [Image.open(io.BytesIO(one.content)).convert("RGB") for one in (made, alone)]
        extrema: Any = ImageChops.difference(*pictures).getextrema()
        assert max(high for _, high in extrema) <= 1
        path = tmp_path / f"{row.number}.png"
        path.write_bytes(made.content)
        (origin,) = read_metadata(path)
        assert (origin.prompt, origin.seed, origin.negative_prompt) == (row.prompt, row.seed, "a boat")


def test_what_fails_together_is_tried_alone_and_each_says_why(maker: ImageWorker) -> None:
    refused = maker.make(rows(num_inference_steps=1, guidance_scale="much"))
    assert [one.row for one in refused] == [1, 2, 3]
    assert all(isinstance(one, RowFailed) and one.error for one in refused)
    odd = maker.make(rows(width=17))
    assert [isinstance(one, RowFailed) and "hint: " in one.error for one in odd] == [True] * 3
