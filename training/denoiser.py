"""Second training stage: the denoiser and the text encoder, trained together."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from training.model import LATENT_CHANNELS, LATENT_SIDE, make_denoiser, make_scheduler, make_text_encoder
from training.run import Stage, average_into
from training.scenes import Batch, Composer, scene_batches
from training.things import Thing

__all__ = ["LatentPool", "Noise", "train_denoiser"]

_BATCH, _RATE = 1024, 1.2e-3
_SCENES_PER_NEW = 8  # one in N scenes per step is new; the others are reused with new noise
_POOL = 200_000
_EMPTY_PROMPTS = 0.08  # fraction, for classifier-free guidance
_TIMESTEP_SHIFT = 1.5  # favors high noise levels, where the model decides what to draw


class LatentPool:
    """Ring buffer of latents and captions on the device; every step replaces the oldest."""

    def __init__(self, size: int, width: int, device: torch.device, frames: tuple[int, ...] = ()) -> None:
        shape = (size, *frames, LATENT_CHANNELS, LATENT_SIDE, LATENT_SIDE)
        self.latents = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self.tokens = torch.zeros(size, width, dtype=torch.int32, device=device)
        self.size, self.filled, self.next = size, 0, 0

    def put(self, latents: torch.Tensor, tokens: torch.Tensor) -> None:
        """Replace the oldest latents and captions."""
        count = len(latents)
        rows = torch.arange(self.next, self.next + count, device=latents.device) % self.size
        self.latents[rows] = latents.to(torch.bfloat16)
        self.tokens[rows] = tokens.to(torch.int32)
        self.next = (self.next + count) % self.size
        self.filled = min(self.size, self.filled + count)

    def draw(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random latents with their captions."""
        rows = torch.randint(self.filled, (count,), device=self.latents.device)
        return self.latents[rows].float(), self.tokens[rows].long()


class Noise:
    """Forward process with v-prediction targets, from the scheduler's noise levels."""

    def __init__(self, device: torch.device, shift: float = _TIMESTEP_SHIFT) -> None:
        self.shift = shift
        alphas = make_scheduler().alphas_cumprod.clone()
        alphas[-1] = 0.0  # the scheduler stores a tiny positive value, because it takes the logarithm
        self.signal, self.noise = alphas.sqrt().to(device), (1 - alphas).sqrt().to(device)

    def add(self, latents: torch.Tensor, frames: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return noisy latents, timesteps and v; the `frames` consecutive latents of a video share a timestep."""
        uniform = torch.rand(len(latents) // frames, device=latents.device).repeat_interleave(frames)
        shifted = self.shift * uniform / (1 + (self.shift - 1) * uniform)
        timesteps = (shifted * len(self.signal)).long().clamp(max=len(self.signal) - 1)
        signal, strength = (levels[timesteps][:, None, None, None] for levels in (self.signal, self.noise))
        noise = torch.randn_like(latents)
        return signal * latents + strength * noise, timesteps, signal * noise - strength * latents


def train_denoiser(
    things: tuple[Thing, ...],
    composer: Composer,
    tokenizer: Any,
    autoencoder: Any,
    folder: Path,
    budget_s: float,
    deadline: float | None,
    workers: int,
    batch: int = _BATCH,
    pool: int = _POOL,
    initial: tuple[Any, Any] | None = None,
    rate: float = _RATE,
    seed: int = 1000,
) -> tuple[Any, Any, bool]:
    """Train or resume; return the averaged denoiser and text encoder, and whether training is finished.

    `initial`: a trained denoiser and text encoder to start from.
    """
    device = composer.levels.device
    denoiser, text_encoder = initial or (make_denoiser(), make_text_encoder(tokenizer))
    denoiser = denoiser.to(device, memory_format=torch.channels_last)
    models = torch.nn.ModuleList([denoiser, text_encoder.to(device)]).train()
    average = copy.deepcopy(models).requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(
        models.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.01, fused=device.type != "cpu"
    )
    stage = Stage("denoiser", folder, budget_s, {"models": models, "average": average, "optimizer": optimizer})
    if not stage.finished:
        latents = _LatentSource(autoencoder, composer, LatentPool(pool, tokenizer.model_max_length, device))
        batches = scene_batches(
            things, tokenizer, max(1, batch // _SCENES_PER_NEW), seed=seed + stage.step, workers=workers
        )
        latents.fill(batches, 20 * batch)
        _train(stage, models, average, optimizer, latents, batches, tokenizer, batch, rate, deadline)
    return average[0], average[1], stage.finished


def _train(
    stage: Stage,
    models: torch.nn.ModuleList,
    average: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    latents: _LatentSource,
    batches: Iterator[Batch],
    tokenizer: Any,
    batch: int,
    rate: float,
    deadline: float | None,
) -> None:
    device = latents.pool.latents.device
    noise = Noise(device)
    empty = tokenizer([""], padding="max_length", return_tensors="pt").input_ids.to(device)
    predict: Any = models[0] if device.type == "cpu" else torch.compile(models[0])
    for share in stage.steps(deadline):
        latents.refresh(next(batches))
        clean, tokens = latents.pool.draw(batch)
        tokens = torch.where(torch.rand(batch, 1, device=device) < _EMPTY_PROMPTS, empty, tokens)
        noisy, timesteps, target = noise.add(clean)
        for group in optimizer.param_groups:
            group["lr"] = stage.learning_rate(share, rate)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
            embeddings = models[1](tokens)[0]
            sample = noisy.contiguous(memory_format=torch.channels_last)
            loss = (predict(sample, timesteps, embeddings, return_dict=False)[0].float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(models.parameters(), 1.0)
        optimizer.step()
        average_into(average, models, stage.step)
        if stage.step % 500 == 0:
            stage.log(loss=loss.item(), pool=latents.pool.filled)


class _LatentSource:
    """Draws and encodes scenes into a pool of latents."""

    def __init__(self, autoencoder: Any, composer: Composer, pool: LatentPool) -> None:
        self.composer, self.pool = composer, pool
        encoder: Any = copy.deepcopy(autoencoder).to(memory_format=torch.channels_last)
        self.encode = encoder._encode if pool.latents.device.type == "cpu" else torch.compile(encoder._encode)

    @torch.no_grad()
    def refresh(self, batch: Batch) -> None:
        """Encode a batch of scenes, which replaces the oldest latents."""
        device = self.pool.latents.device
        batch = batch.to(device)
        images = self.composer.draw(batch).contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
            moments = self.encode(images)
        self.pool.put(moments[:, :LATENT_CHANNELS], batch.tokens)

    def fill(self, batches: Iterator[Batch], count: int) -> None:
        """Encode scenes until the pool has this many."""
        while self.pool.filled < count:
            self.refresh(next(batches))
