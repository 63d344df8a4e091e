"""First training stage: the autoencoder."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from training.model import LATENT_CHANNELS, make_autoencoder
from training.run import Stage, average_into
from training.scenes import Composer, scene_batches
from training.things import Thing

__all__ = ["standardize", "train_autoencoder"]

_BATCH, _RATE = 192, 1.5e-3
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


def _image_loss(image: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a multi-scale loss that weighs flat color, shapes and edges equally."""
    loss = (image - target).square().mean()
    for _ in range(4):
        loss = loss + 0.5 * (image - target).abs().mean()
        across = (image.diff(dim=3) - target.diff(dim=3)).abs().mean()
        down = (image.diff(dim=2) - target.diff(dim=2)).abs().mean()
        loss = loss + 0.5 * (across + down)
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
        round_trip: Any = _RoundTrip(model)
        if device.type != "cpu":
            round_trip = torch.compile(round_trip)
        batches = scene_batches(things, tokenizer, batch, seed=1 + stage.step, workers=workers)
        for share in stage.steps(deadline):
            images = composer.draw(next(batches).to(device)).contiguous(memory_format=torch.channels_last)
            for group in optimizer.param_groups:
                group["lr"] = stage.learning_rate(share, _RATE)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
                loss, error = round_trip(images)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            average_into(average, model, stage.step, longest=0.998)
            if stage.step % 250 == 0:
                stage.log(loss=loss.item(), psnr_db=10 * math.log10(4 / error.item()))
    average.eval()
    batches = scene_batches(things, tokenizer, 8 * batch, seed=2, workers=0)
    standardize(average, composer.draw(next(batches).to(device)))
    return average, stage.finished


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
