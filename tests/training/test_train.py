"""Training: stop, resume, and save a pipeline."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers as plain
import numpy as np
import pytest
import torch

from anyaccel.embedded.judge import load_judge
from anyaccel.embedded.model import find_embedded_model
from anyaccel.processes.forked_call import call_in_fork
from training.__main__ import main
from training.autoencoder import standardize
from training.prepare import load_things
from training.run import Stage, average_into
from training.scenes import Composer

diffusers: Any = plain  # diffusers has no complete type annotations


def make_stage(folder: Path, budget_s: float) -> tuple[Stage, torch.nn.Linear]:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    return Stage("trial", folder, budget_s, {"model": model, "optimizer": optimizer}), model


def test_a_stopped_stage_resumes(tmp_path: Path) -> None:
    stage, model = make_stage(tmp_path, budget_s=1000.0)
    for share in stage.steps():
        assert 0 <= share < 1
        with torch.no_grad():
            model.weight.fill_(stage.step)
        if stage.step == 11:
            stage.spent_s = 400.0
            stage.save()
            break
    resumed, restored = make_stage(tmp_path, budget_s=1000.0)
    assert (resumed.step, resumed.spent_s) == (11, 400.0)
    assert restored.weight.tolist() == [[11.0, 11.0], [11.0, 11.0]]
    assert next(resumed.steps()) == pytest.approx(0.4, abs=0.01)
    spent, _ = make_stage(tmp_path, budget_s=300.0)
    assert spent.finished
    assert list(spent.steps()) == []


def test_the_learning_rate_warms_up_and_decays(tmp_path: Path) -> None:
    stage, _ = make_stage(tmp_path, budget_s=1.0)
    assert stage.learning_rate(0.0, 1.0) < 0.01
    stage.step = 5000
    assert stage.learning_rate(0.0, 1.0) == 1.0
    assert stage.learning_rate(0.5, 1.0) == pytest.approx(0.505)
    assert stage.learning_rate(1.0, 1.0) == pytest.approx(0.01)


def test_the_moving_average_converges(tmp_path: Path) -> None:
    model, average = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1).requires_grad_(False)
    for step in range(200):
        average_into(average, model, step, longest=0.9)
    assert torch.allclose(average.weight, model.weight, atol=1e-5)


def test_standardized_latents_decode_to_the_same_images() -> None:
    torch.manual_seed(0)
    autoencoder = diffusers.AutoencoderKL(
        latent_channels=8, block_out_channels=(8, 8, 8, 8), norm_num_groups=4, layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    ).eval()  # fmt: skip
    images = torch.rand(4, 3, 128, 128) * 2 - 1
    with torch.no_grad():
        before = autoencoder.decode(autoencoder.encode(images).latent_dist.mean).sample
        standardize(autoencoder, images)
        latents = autoencoder.encode(images).latent_dist.mean
        after = autoencoder.decode(latents).sample
    assert torch.allclose(latents.mean((0, 2, 3)), torch.zeros(8), atol=1e-3)
    assert torch.allclose(latents.std((0, 2, 3)), torch.ones(8), atol=1e-2)
    assert torch.allclose(before, after, atol=1e-3)


@pytest.fixture
def restored_precision() -> Iterator[None]:
    """Restore the process-wide settings that training changes."""
    before, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(before)
    torch.backends.cudnn.benchmark = benchmark


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a folder with the judge's small glyphs and the tokenizer."""
    folder = tmp_path / "data"
    folder.mkdir()
    small = (load_judge().glyphs * 255).round().astype(np.uint8)
    np.savez(folder / "glyphs.npz", glyphs=np.pad(small, ((0, 0), (40, 40), (40, 40), (0, 0))))
    (folder / "tokenizer").symlink_to(find_embedded_model() / "tokenizer")
    return folder


@pytest.mark.usefixtures("restored_precision")
@pytest.mark.slow
def test_the_command_trains_stops_and_resumes(data: Path, tmp_path: Path) -> None:
    """Run a few steps with batches of two images.

    Runs in a child process: torch counts devices when it first computes a gradient, and other tests fork virtual
    devices from this process.
    """
    out = tmp_path / "out"
    arguments = ["train", "--data", str(data), "--out", str(out), "--device", "cpu", "--batch", "2", "--workers", "0"]
    arguments += ["--autoencoder-minutes", "0.01", "--denoiser-minutes", "0.01"]
    assert call_in_fork(lambda: main([*arguments, "--stop-after-minutes", "0.0001"])) == 1
    assert (out / "autoencoder.pt").is_file()
    assert not (out / "model").exists()
    assert call_in_fork(lambda: main(arguments)) == 0
    pipe = diffusers.DiffusionPipeline.from_pretrained(out / "model")
    assert type(pipe) is diffusers.StableDiffusionPipeline
    stages = [json.loads(line)["stage"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert set(stages) == {"autoencoder", "denoiser"}


@pytest.mark.long
def test_a_refined_model_keeps_its_latent_space(data: Path, tmp_path: Path) -> None:
    """Run a few steps, stop, resume, and compare the encoder and the decoder with those of the embedded model."""
    out = tmp_path / "out"
    arguments = ["refine", "--data", str(data), "--out", str(out), "--device", "cpu", "--batch", "2", "--workers", "0"]
    arguments += ["--minutes", "0.02", "--decoder-minutes", "0.02"]
    command = [sys.executable, "-m", "training", *arguments]  # it starts a process, which a forked call cannot
    assert subprocess.run([*command, "--stop-after-minutes", "0.0001"], check=False).returncode == 1
    assert subprocess.run(command, check=False).returncode == 0
    before = diffusers.AutoencoderKL.from_pretrained(find_embedded_model() / "vae").state_dict()
    after = diffusers.DiffusionPipeline.from_pretrained(out / "model").vae.state_dict()
    changed = {name.split(".")[0] for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert changed == {"post_quant_conv", "decoder"}
    first = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert {line["stage"] for line in first} == {"decoder", "denoiser"}
    assert max(line["loss"] for line in first) < 1  # a new model starts at 1.1 and 3.0


def test_the_composer_has_three_levels_of_detail() -> None:
    assert Composer(np.zeros((2, 128, 128, 4), np.uint8), torch.device("cpu")).levels.shape == (3, 2, 4, 128, 128)
    assert len(load_things()) == len(load_judge().names)
