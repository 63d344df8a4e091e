"""The first stage: pictures to latents and back."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses

from training.model import LATENT_CHANNELS, make_autoencoder
from training.run import Stage, average_into
from training.scenes import Composer, scene_batches
from training.things import Thing

__all__ = ["standardize", "train_autoencoder"]

_BATCH, _RATE = 192, 1.5e-3
_NOISE = 0.15  # what is added to a latent in training, so that near latents give near pictures
_SMALL = 1e-3  # the price of large latents, without which the noise could be outgrown


class _RoundTrip(torch.nn.Module):
    """Encode, disturb, decode; the loss of it."""

    def __init__(self, autoencoder: Any) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = self.autoencoder._encode(pictures)[:, :LATENT_CHANNELS]
        noisy = mean + _NOISE * torch.randn_like(mean)
        made = self.autoencoder._decode(noisy).sample.float()
        error = (made - pictures).square().mean()
        return _difference(made, pictures) + _SMALL * mean.float().square().mean(), error


def _difference(made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """How far pictures are apart, by eye: the same weight for flat colour, for shape and for edges."""
    loss = (made - wanted).square().mean()
    for _ in range(4):
        loss = loss + 0.5 * (made - wanted).abs().mean()
        across = (made.diff(dim=3) - wanted.diff(dim=3)).abs().mean()
        down = (made.diff(dim=2) - wanted.diff(dim=2)).abs().mean()
        loss = loss + 0.5 * (across + down)
        made, wanted = F.avg_pool2d(made, 2), F.avg_pool2d(wanted, 2)
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
    """Train or go on training; the averaged autoencoder, its latents standardized, and whether it is done."""
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
            pictures = composer.draw(next(batches).to(device)).contiguous(memory_format=torch.channels_last)
            for group in optimizer.param_groups:
                group["lr"] = stage.learning_rate(share, _RATE)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
                loss, error = round_trip(pictures)
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
def standardize(autoencoder: Any, pictures: torch.Tensor) -> None:
    """Make every channel of the latents have mean 0 and deviation 1, exactly undone by the decoder's first layer."""
    made = [autoencoder.encode(part).latent_dist.mean.float() for part in pictures.split(256)]
    latents = torch.cat(made).transpose(0, 1).flatten(1)
    middle, spread = latents.mean(1), latents.std(1)
    first, last = autoencoder.quant_conv, autoencoder.post_quant_conv
    means = slice(0, LATENT_CHANNELS)
    first.weight[means] = first.weight[means] / spread[:, None, None, None]
    first.bias[means] = (first.bias[means] - middle) / spread
    # The spread of the noise, as the latents are now: what `latent_dist.sample()` adds.
    first.weight[LATENT_CHANNELS:] = 0
    first.bias[LATENT_CHANNELS:] = 2 * torch.log(_NOISE / spread)
    last.bias += last.weight[:, :, 0, 0] @ middle
    last.weight *= spread[None, :, None, None]
