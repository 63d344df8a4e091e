"""First training stage: the autoencoder; and the later refinement of its decoder."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from training.model import LATENT_CHANNELS, make_autoencoder
from training.run import Stage, average_into
from training.scenes import Batch, Composer, scene_batches
from training.things import Thing

__all__ = ["refine_decoder", "standardize", "train_autoencoder"]

_BATCH, _RATE = 192, 1.5e-3
_REFINE_RATE, _REFINE_EDGES = 8e-4, 1.0
_NOISE = 0.15  # standard deviation of the noise added to latents in training, to smooth the latent space
_LATENT_PENALTY = 1e-3  # otherwise the latents could grow until the noise has no effect


class _RoundTrip(torch.nn.Module):
    """Encodes, adds noise, decodes, and computes the loss."""

    def __init__(self, autoencoder: Any) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = self.autoencoder._encode(images)[:, :LATENT_CHANNELS]
        noisy = mean + _NOISE * torch.randn_like(mean)
        decoded = self.autoencoder._decode(noisy).sample.float()
        error = (decoded - images).square().mean()
        return _image_loss(decoded, images) + _LATENT_PENALTY * mean.float().square().mean(), error


class _Decoding(torch.nn.Module):
    """Decodes noisy latents and computes the loss; the noise has the variance that the encoder states."""

    def __init__(self, autoencoder: Any) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            mean, logarithm = self.autoencoder._encode(images).float().chunk(2, 1)
            noisy = mean + (logarithm / 2).exp() * torch.randn_like(mean)
        decoded = self.autoencoder._decode(noisy).sample.float()
        return _image_loss(decoded, images, _REFINE_EDGES), (decoded - images).square().mean()


def _image_loss(image: torch.Tensor, target: torch.Tensor, edges: float = 0.5) -> torch.Tensor:
    """Return a multi-scale loss that by default weighs flat color, shapes and edges equally."""
    loss = (image - target).square().mean()
    for _ in range(4):
        loss = loss + 0.5 * (image - target).abs().mean()
        across = (image.diff(dim=3) - target.diff(dim=3)).abs().mean()
        down = (image.diff(dim=2) - target.diff(dim=2)).abs().mean()
        loss = loss + edges * (across + down)
        image, target = F.avg_pool2d(image, 2), F.avg_pool2d(target, 2)
    return loss


def train_autoencoder(
    things: tuple[Thing, ...],
    composer: Composer,
    tokenizer: Any,
    folder: Path,
    budget_s: float,
    deadline: float | None,
    workers: int,
    batch: int = _BATCH,
) -> tuple[Any, bool]:
    """Train or resume; return the averaged autoencoder with standardized latents, and whether training is finished."""
    device = composer.levels.device
    model = make_autoencoder().to(device, memory_format=torch.channels_last)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.99), weight_decay=1e-3)
    stage = Stage("autoencoder", folder, budget_s, {"model": model, "average": average, "optimizer": optimizer})
    if not stage.finished:
        batches = scene_batches(things, tokenizer, batch, seed=1 + stage.step, workers=workers)
        _train(stage, _RoundTrip(model), model, average, optimizer, composer, batches, _RATE, deadline)
    average.eval()
    batches = scene_batches(things, tokenizer, 8 * batch, seed=2, workers=0)
    standardize(average, composer.draw(next(batches).to(device)))
    return average, stage.finished


def refine_decoder(
    model: Any,
    things: tuple[Thing, ...],
    composer: Composer,
    tokenizer: Any,
    folder: Path,
    budget_s: float,
    deadline: float | None,
    workers: int,
    batch: int = _BATCH,
    seed: int = 1,
) -> tuple[Any, bool]:
    """Train only the decoder of a trained autoencoder, or resume; return the average, and whether it is finished."""
    device = composer.levels.device
    model = model.to(device, memory_format=torch.channels_last).requires_grad_(False).train()
    decoder = torch.nn.ModuleList([model.post_quant_conv, model.decoder]).requires_grad_(True)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=_REFINE_RATE, betas=(0.9, 0.99), weight_decay=1e-3)
    stage = Stage("decoder", folder, budget_s, {"model": model, "average": average, "optimizer": optimizer})
    if not stage.finished:
        batches = scene_batches(things, tokenizer, batch, seed=seed + stage.step, workers=workers)
        _train(stage, _Decoding(model), model, average, optimizer, composer, batches, _REFINE_RATE, deadline)
    return average.eval(), stage.finished


def _train(
    stage: Stage,
    loss_of: Any,
    model: Any,
    average: Any,
    optimizer: torch.optim.Optimizer,
    composer: Composer,
    batches: Iterator[Batch],
    rate: float,
    deadline: float | None,
) -> None:
    device = composer.levels.device
    if device.type != "cpu":
        loss_of = torch.compile(loss_of)
    for share in stage.steps(deadline):
        images = composer.draw(next(batches).to(device)).contiguous(memory_format=torch.channels_last)
        for group in optimizer.param_groups:
            group["lr"] = stage.learning_rate(share, rate)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
            loss, error = loss_of(images)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average_into(average, model, stage.step, longest=0.998)
        if stage.step % 250 == 0:
            stage.log(loss=loss.item(), psnr_db=10 * math.log10(4 / error.item()))


@torch.no_grad()
def standardize(autoencoder: Any, images: torch.Tensor) -> None:
    """Scale every latent channel to mean 0 and standard deviation 1; the decoder's first layer inverts it exactly."""
    chunks = [autoencoder.encode(chunk).latent_dist.mean.float() for chunk in images.split(256)]
    latents = torch.cat(chunks).transpose(0, 1).flatten(1)
    mean, std = latents.mean(1), latents.std(1)
    first, last = autoencoder.quant_conv, autoencoder.post_quant_conv
    mean_channels = slice(0, LATENT_CHANNELS)
    first.weight[mean_channels] = first.weight[mean_channels] / std[:, None, None, None]
    first.bias[mean_channels] = (first.bias[mean_channels] - mean) / std
    # `latent_dist.sample()` adds the noise of training, in the new scale.
    first.weight[LATENT_CHANNELS:] = 0
    first.bias[LATENT_CHANNELS:] = 2 * torch.log(_NOISE / std)
    last.bias += last.weight[:, :, 0, 0] @ mean
    last.weight *= std[None, :, None, None]
