"""One command that trains the model on one GPU: `python -m training train`; run it again and it goes on."""

from __future__ import annotations

import time
from pathlib import Path

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
    """Train both stages, each as long as its budget; whether everything is done. Leaves the model in `out/model`."""
    deadline = time.monotonic() + 60 * stop_after_minutes if stop_after_minutes else None
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    things, glyphs, tokenizer = load_data(data)
    composer = Composer(glyphs, torch.device(device))
    sizes = {"batch": batch} if batch else {}
    budget = 60 * autoencoder_minutes
    autoencoder, done = train_autoencoder(things, composer, tokenizer, out, budget, deadline, workers, **sizes)
    if not done:
        return False
    budget = 60 * denoiser_minutes
    denoiser, text_encoder, done = train_denoiser(
        things, composer, tokenizer, autoencoder, out, budget, deadline, workers, **sizes
    )
    parts = [part.to("cpu", memory_format=torch.contiguous_format) for part in (autoencoder, denoiser)]
    save(assemble(parts[0], text_encoder.to("cpu"), tokenizer, parts[1]), out / "model", shard="12MB")
    return done
