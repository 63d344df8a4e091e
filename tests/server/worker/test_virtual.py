"""Serving on virtual devices: same images as the CPU, batched only where batches are reliable."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest

from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.server.settings import ServedName, ServerSettings
from anyaccel.server.worker.denoise_progress import StepObserver
from anyaccel.server.worker.job_spec import JobSpec
from anyaccel.server.worker.served_model import ServedModel

SIZE, SEEDS = 64, (7, 8, 9)
pytestmark = pytest.mark.usefixtures("pipelines_imported")


def serve(folder: Path, device: str) -> tuple[ServedModel, list[Any]]:
    """Generate three images concurrently."""
    settings = ServerSettings(
        models=(ServedName("tiny", str(folder)),), data=folder, device=device, dtype="float32", sizes=((SIZE, SIZE),),
        max_batch=3,
    )  # fmt: skip
    model = ServedModel(settings.models[0], settings)
    specs = [
        JobSpec(
            task="generate", model="tiny", prompt="a cat", seeds=(seed,), width=SIZE, height=SIZE, num_inference_steps=3
        )
        for seed in SEEDS
    ]
    with ThreadPoolExecutor(3) as threads:
        images = threads.map(lambda spec: model.generate(spec, 0, {}, StepObserver(lambda done, total: None))[0], specs)
        return model, [numpy.asarray(image).astype(int) for image in images]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    return serve(folder, "cpu")[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("device", "batched", "padded"),
    [
        ("neuron", True, True),
        ("mps", False, None),
        pytest.param("hpu", True, None, marks=pytest.mark.slow),  # as neuron, without padding
    ],
)
def test_images_equal_those_of_the_cpu(
    device: str, batched: bool, padded: bool | None, folder: Path, expected: list[Any]
) -> None:
    def run(accelerator: VirtualAccelerator) -> tuple[Any, ...]:
        accelerator.ledger.clear()
        model, images = serve(folder, device)
        effects = {row.effect for row in accelerator.ledger.rows()}
        rows = () if model.shared is None else tuple(model.shared.forwards["unet"].batch_seconds)
        facts = model.facts()
        return images, effects, model.shared is not None, rows, facts.max_concurrent, facts.virtual, facts.fixed_sizes

    images, effects, shared, rows, max_concurrent, virtual, fixed = run_forked(device, run)
    for image, wanted in zip(images, expected, strict=True):
        assert abs(image - wanted).max() <= 1
    assert not effects & {"error", "wrong"}
    assert (shared, max_concurrent, virtual) == (batched, 3 if batched else 1, True)
    if padded:
        assert rows == (2, 4, 6), "batches are padded to prepared sizes"
        assert fixed
