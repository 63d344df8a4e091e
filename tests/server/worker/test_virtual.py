"""Served on virtual devices: the CPU's pictures, joined where batches are reliable, and in sizes that are ready."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest

from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.server.settings import ServedName, ServerSettings
from anyaccel.server.worker.denoise_progress import Watcher
from anyaccel.server.worker.job_spec import JobSpec
from anyaccel.server.worker.served_model import ServedModel

SIZE, SEEDS = 64, (7, 8, 9)
pytestmark = pytest.mark.usefixtures("pipelines_imported")


def serve(folder: Path, device: str) -> tuple[ServedModel, list[Any]]:
    """Three calls at once."""
    settings = ServerSettings(
        models=(ServedName("tiny", str(folder)),), data=folder, device=device, dtype="float32", sizes=((SIZE, SIZE),),
        max_batch=3,
    )  # fmt: skip
    model = ServedModel(settings.models[0], settings)
    works = [
        JobSpec(
            task="generate", model="tiny", prompt="a cat", seeds=(seed,), width=SIZE, height=SIZE, num_inference_steps=3
        )
        for seed in SEEDS
    ]
    with ThreadPoolExecutor(3) as threads:
        made = threads.map(lambda work: model.make(work, 0, {}, Watcher(lambda done, total: None))[0], works)
        return model, [numpy.asarray(image).astype(int) for image in made]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    return serve(folder, "cpu")[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("device", "joined", "padded"), [("neuron", True, True), ("hpu", True, None), ("mps", False, None)]
)
def test_the_pictures_are_those_of_the_cpu(
    device: str, joined: bool, padded: bool | None, folder: Path, expected: list[Any]
) -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[Any, ...]:
        accelerator.ledger.clear()
        model, made = serve(folder, device)
        effects = {row.effect for row in accelerator.ledger.rows()}
        rows = () if model.shared is None else tuple(model.shared.meetings["unet"].full_rows)
        facts = model.facts()
        return made, effects, model.shared is not None, rows, facts.at_once, facts.virtual, facts.fixed_sizes

    made, effects, shared, rows, at_once, virtual, fixed = run_forked(device, use)
    for one, other in zip(made, expected, strict=True):
        assert abs(one - other).max() <= 1
    assert not effects & {"error", "wrong"}
    assert (shared, at_once, virtual) == (joined, 3 if joined else 1, True)
    if padded:
        assert rows == (2, 4, 6), "rounds are filled up to sizes that were run ahead"
        assert fixed
