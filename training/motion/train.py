"""Training of the motion module: `python -m training motion`, which resumes when it is run again."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from anyaccel.embedded.motion import FRAMES, MOTIONS
from anyaccel.errors import UsageError
from training.denoiser import LatentPool, Noise
from training.model import LATENT_CHANNELS
from training.motion.model import VideoModel
from training.motion.scenes import VideoBatch, draw_video, video_batches
from training.prepare import Glyphs, load_things
from training.run import Stage, average_into
from training.scenes import Composer
from training.things import Thing

__all__ = ["MotionSettings", "train_motion"]

_EMPTY_PROMPTS = 0.08  # fraction, for classifier-free guidance
_TIMESTEP_SHIFT = 2.5  # higher than for images: the frames of a video show the same thing, so more noise is needed


@dataclass(frozen=True)
class MotionSettings:
    """Settings of a training run."""

    minutes: float = 24.0
    stop_after_minutes: float | None = None
    batch: int = 64
    """Videos per step. 256 or more exceed the grid size of CUDA's attention kernels (256 positions per video)."""
    rate: float = 1e-3
    rank: int = 16
    frames: int = FRAMES
    motions: tuple[str, ...] = tuple(MOTIONS)
    things: tuple[str, ...] = ()
    """Names of the things; empty: all."""
    scenes: int = 0
    """Number of different scenes, for a test that the model can learn them by heart; 0: new ones at every step."""
    videos_per_new: int = 8
    """One in N videos per step is new; the others are reused with new noise."""
    pool: int = 48_000
    workers: int = 6
    compiled: bool = True
    image_model: Path | None = None
    """Folder of the image model; None: the embedded model."""


def train_motion(glyphs: Glyphs, folder: Path, device: torch.device, settings: MotionSettings) -> bool:
    """Train or resume, and save the averaged weights in `folder/motion`; return whether training is finished."""
    deadline = time.monotonic() + 60 * settings.stop_after_minutes if settings.stop_after_minutes else None
    things = load_things()
    model = VideoModel(settings.image_model, settings.rank).to(device)
    average = copy.deepcopy(model.trained).requires_grad_(False)
    optimizer = torch.optim.AdamW(
        model.trained.parameters(), lr=settings.rate, betas=(0.9, 0.99), weight_decay=0.01, fused=device.type != "cpu"
    )
    state = {"trained": model.trained, "average": average, "optimizer": optimizer}
    stage = Stage("motion", folder, 60 * settings.minutes, state, warm_up_steps=10 if settings.scenes else 300)
    if not stage.finished:
        new = max(1, settings.batch // settings.videos_per_new)
        source = _VideoSource(model, Composer(glyphs, device), settings)
        batches = video_batches(
            things, model.tokenizer, new, seed=3000 + stage.step, workers=settings.workers,
            frames=settings.frames, motions=settings.motions, indices=_find_indices(things, settings.things),
        )  # fmt: skip
        _train(stage, model, average, optimizer, source, batches, settings, deadline)
    with torch.no_grad():
        torch._foreach_copy_(list(model.trained.parameters()), list(average.parameters()))
    model.save(folder / "motion")
    return stage.finished


def _find_indices(things: tuple[Thing, ...], names: tuple[str, ...]) -> tuple[int, ...]:
    known = {name: index for index, thing in enumerate(things) for name in thing.names}
    for name in names:
        if name not in known:
            raise UsageError(f"unknown thing {name!r}", hint="see src/anyaccel/embedded/things.json")
    return tuple(known[name] for name in names)


def _train(
    stage: Stage,
    model: VideoModel,
    average: torch.nn.ParameterList,
    optimizer: torch.optim.Optimizer,
    source: _VideoSource,
    batches: Iterator[VideoBatch],
    settings: MotionSettings,
    deadline: float | None,
) -> None:
    device, frames, count = source.pool.latents.device, settings.frames, settings.batch
    source.fill(batches, settings.scenes or min(settings.pool, 40 * count))
    noise, log_steps = Noise(device, _TIMESTEP_SHIFT), 10 if device.type == "cpu" else 100
    empty = model.tokenizer([""], padding="max_length", return_tensors="pt").input_ids.to(device)
    predict: Any = torch.compile(model.unet) if settings.compiled else model.unet
    total, summed = torch.zeros((), device=device), 0
    for share in stage.steps(deadline):
        if not settings.scenes:
            source.refresh(next(batches))
        clean, tokens = source.pool.draw(count)
        tokens = torch.where(torch.rand(count, 1, device=device) < _EMPTY_PROMPTS, empty, tokens)
        noisy, timesteps, target = noise.add(clean.flatten(0, 1), frames)
        for group in optimizer.param_groups:
            group["lr"] = stage.learning_rate(share, settings.rate)
        sample, target = (_as_video(values, frames) for values in (noisy, target))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
            embeddings = model.text_encoder(tokens)[0].repeat_interleave(frames, 0)
            predicted = predict(sample, timesteps[::frames], embeddings, return_dict=False)[0]
            loss = (predicted.float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.trained.parameters(), 1.0)
        optimizer.step()
        average_into(average, model.trained, stage.step)
        total, summed = total + loss.detach(), summed + 1
        if stage.step % log_steps == 0:
            stage.log(loss=total.item() / summed, learning_rate=optimizer.param_groups[0]["lr"])
            total, summed = torch.zeros_like(total), 0


def _as_video(frames_first: torch.Tensor, frames: int) -> torch.Tensor:
    """Convert [videos × frames, channels, …] to [videos, channels, frames, …]."""
    videos: torch.Tensor = frames_first.unflatten(0, (-1, frames))
    return videos.transpose(1, 2)


class _VideoSource:
    """Draws and encodes videos into a pool of latents."""

    def __init__(self, model: VideoModel, composer: Composer, settings: MotionSettings) -> None:
        device = composer.levels.device
        size = settings.scenes or settings.pool
        self.composer, self.frames = composer, settings.frames
        self.pool = LatentPool(size, model.tokenizer.model_max_length, device, (settings.frames,))
        encode = model.autoencoder._encode
        self.encode: Any = torch.compile(encode) if settings.compiled else encode

    @torch.no_grad()
    def refresh(self, batch: VideoBatch) -> None:
        """Encode a batch of videos, which replaces the oldest latents."""
        device = self.pool.latents.device
        batch = batch.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
            moments = self.encode(draw_video(self.composer, batch))
        self.pool.put(moments[:, :LATENT_CHANNELS].unflatten(0, (-1, self.frames)), batch.tokens)

    def fill(self, batches: Iterator[VideoBatch], count: int) -> None:
        """Encode videos until the pool has this many."""
        while self.pool.filled < count:
            self.refresh(next(batches))
