"""Training of the embedded model on one GPU: `python -m training train`, which resumes when it is run again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from training.autoencoder import train_autoencoder
from training.denoiser import train_denoiser
from training.model import assemble, save
from training.prepare import load_data
from training.scenes import Composer

__all__ = ["train"]


def train(
    data: Path,
    out: Path,
    device: str,
    autoencoder_minutes: float,
    denoiser_minutes: float,
    stop_after_minutes: float | None,
    workers: int,
    batch: int | None = None,
) -> bool:
    """Train both stages for their budgets and save the model in `out/model`; return whether training is finished."""
    deadline = time.monotonic() + 60 * stop_after_minutes if stop_after_minutes else None
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    things, glyphs, tokenizer = load_data(data)
    composer = Composer(glyphs, torch.device(device))
    sizes: dict[str, Any] = {"batch": batch} if batch else {}
    budget = 60 * autoencoder_minutes
    autoencoder, done = train_autoencoder(things, composer, tokenizer, out, budget, deadline, workers, **sizes)
    if not done:
        return False
    budget = 60 * denoiser_minutes
    denoiser, text_encoder, done = train_denoiser(
        things, composer, tokenizer, autoencoder, out, budget, deadline, workers, **sizes
    )
    models = [model.to("cpu", memory_format=torch.contiguous_format) for model in (autoencoder, denoiser)]
    save(assemble(models[0], text_encoder.to("cpu"), tokenizer, models[1]), out / "model", shard="12MB")
    return done
