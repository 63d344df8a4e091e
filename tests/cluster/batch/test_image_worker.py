"""Tests for `ImageWorker`: rows of the same shape share a call, and run one by one if that call fails."""

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageChops

from anyaccel.cluster.batch.image_worker import ImageWorker, RowFailed, RowImage, WorkerSettings
from anyaccel.cluster.batch.rows import BatchRow
from anyaccel.generation.image_format import read_metadata


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> ImageWorker:
    from anyaccel.recipes import recipes

    folder = tmp_path_factory.mktemp("models") / "tiny"
    pipe: Any = recipes()["stable-diffusion"].make()
    pipe.save_pretrained(folder)
    return ImageWorker(WorkerSettings(model=str(folder), device="cpu", dtype="float32", rows_per_call=4))


def rows(**call: Any) -> list[BatchRow]:
    prompts = ("a cat", "a dog", "a red apple")
    return [BatchRow(number=n + 1, prompt=text, seed=10 + n, call=call) for n, text in enumerate(prompts)]


def test_images_of_a_shared_call_equal_those_generated_alone(worker: ImageWorker, tmp_path: Path) -> None:
    assert worker.facts.rows_per_call == 4
    requested = rows(num_inference_steps=2, negative_prompt="a boat")
    together = worker.generate(requested)
    for row, shared in zip(requested, together, strict=True):
        (alone,) = worker.generate([row])
        assert isinstance(shared, RowImage)
        assert isinstance(alone, RowImage)
        images = [Image.open(io.BytesIO(outcome.content)).convert("RGB") for outcome in (shared, alone)]
        extrema: Any = ImageChops.difference(*images).getextrema()
        assert max(high for _, high in extrema) <= 1
        path = tmp_path / f"{row.number}.png"
        path.write_bytes(shared.content)
        (metadata,) = read_metadata(path)
        assert (metadata.prompt, metadata.seed, metadata.negative_prompt) == (row.prompt, row.seed, "a boat")


def test_rows_of_a_failed_call_run_alone_and_each_has_its_error(worker: ImageWorker) -> None:
    failed = worker.generate(rows(num_inference_steps=1, guidance_scale="much"))
    assert [outcome.row for outcome in failed] == [1, 2, 3]
    assert all(isinstance(outcome, RowFailed) and outcome.error for outcome in failed)
    failed = worker.generate(rows(width=17))
    assert [isinstance(outcome, RowFailed) and "hint: " in outcome.error for outcome in failed] == [True] * 3
    assert all(isinstance(outcome, RowFailed) and "width must be a multiple of" in outcome.error for outcome in failed)


def test_inputs_and_schedulers_of_rows(worker: ImageWorker, tmp_path: Path) -> None:
    """Rows with an image use image-to-image, and the next row has the model's own scheduler again."""
    Image.linear_gradient("L").resize((16, 16)).convert("RGB").save(tmp_path / "in.png")
    call = {"num_inference_steps": 2}
    plain = BatchRow(number=1, prompt="a cat", seed=3, call=call)
    euler = BatchRow(number=2, prompt="a cat", seed=3, call=call, additions={"scheduler": "euler"})
    edit = BatchRow(number=3, prompt="a cat", seed=3, call={**call, "image": str(tmp_path / "in.png"), "strength": 0.6})
    contents = []
    for row in (plain, euler, edit, plain):
        (outcome,) = worker.generate([row])
        assert isinstance(outcome, RowImage), outcome
        contents.append(outcome.content)
    assert contents[0] == contents[3]
    (tmp_path / "euler.png").write_bytes(contents[1])
    (tmp_path / "edit.png").write_bytes(contents[2])
    assert read_metadata(tmp_path / "euler.png")[0].scheduler == "EulerDiscreteScheduler"
    (metadata,) = read_metadata(tmp_path / "edit.png")
    assert (metadata.pipeline, metadata.inputs[0]["path"]) == (
        "StableDiffusionImg2ImgPipeline",
        str(tmp_path / "in.png"),
    )
    (failed,) = worker.generate(
        [BatchRow(number=4, prompt="a cat", seed=3, call=call, additions={"scheduler": "eulr"})]
    )
    assert isinstance(failed, RowFailed)
    assert "did you mean euler" in failed.error


def test_videos(tmp_path: Path) -> None:
    from anyaccel.recipes import recipes

    pipe: Any = recipes()["wan"].make()
    pipe.save_pretrained(tmp_path / "wan")
    worker = ImageWorker(WorkerSettings(model=str(tmp_path / "wan"), device="cpu", dtype="float32", rows_per_call=4))
    call = {"num_inference_steps": 2, "frames": 5, "fps": 8, "width": 16, "height": 16, "max_sequence_length": 32}
    outcomes = worker.generate([BatchRow(number=n, prompt="a cat", seed=n, call=call) for n in (1, 2)])
    for outcome in outcomes:
        assert isinstance(outcome, RowImage), outcome
        path = tmp_path / f"{outcome.row}{outcome.suffix}"
        path.write_bytes(outcome.content)
        (metadata,) = read_metadata(path)
        assert (metadata.kind, metadata.frames, metadata.fps, metadata.seed) == ("video", 5, 8, outcome.row)
