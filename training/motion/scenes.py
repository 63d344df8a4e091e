"""Videos of one moving thing with their captions, composed on the training device."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image

from anyaccel.embedded.judge import BACKGROUNDS
from anyaccel.embedded.motion import FRAMES, MOTIONS
from training.captions import background_phrase, choose_color, draw_background, phrase, with_article
from training.colors import COLORS
from training.motion.tracks import STILL, Track, make_track
from training.scenes import Composer
from training.things import Thing

__all__ = [
    "VideoBatch",
    "VideoScene",
    "as_frames",
    "draw_scene_frames",
    "draw_video",
    "draw_video_scene",
    "plain_scene",
    "render_video",
    "video_batches",
]

_STILL_SHARE = 0.06  # of the captions name no motion
_COLOR_SHARE = 0.08  # of the things get another color


@dataclass(frozen=True)
class VideoScene:
    """Caption and content of a video."""

    caption: str
    thing: int
    motion: str
    track: Track
    background: str = field(default="white")
    color: str | None = None


@dataclass(frozen=True)
class VideoBatch:
    """Scenes as tensors: `things` [B], `recolors` [B], `tracks` [B, frames, 5], `colors` [B, 3], `tokens`."""

    things: torch.Tensor
    recolors: torch.Tensor
    tracks: torch.Tensor
    colors: torch.Tensor
    tokens: torch.Tensor

    def to(self, device: torch.device) -> VideoBatch:
        """Return the batch on a device."""
        return VideoBatch(*(tensor.to(device, non_blocking=True) for tensor in self._tensors()))

    def pin_memory(self) -> VideoBatch:
        """Return the batch in pinned memory, from which a GPU can copy asynchronously."""
        return VideoBatch(*(tensor.pin_memory() for tensor in self._tensors()))

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        return self.things, self.recolors, self.tracks, self.colors, self.tokens


def draw_video_scene(
    things: tuple[Thing, ...],
    rng: random.Random,
    frames: int = FRAMES,
    motions: tuple[str, ...] = tuple(MOTIONS),
    indices: tuple[int, ...] = (),
) -> VideoScene:
    """Return a random scene with one of the motions and one of the things with these indices (default: all)."""
    index = rng.choice(indices) if indices else rng.randrange(len(things))
    motion = STILL if rng.random() < _STILL_SHARE else rng.choice(motions)
    background = draw_background(rng)
    color = choose_color(things[index], background, _COLOR_SHARE, rng)
    caption = phrase(things[index], "", rng, color)
    if motion != STILL:
        words = rng.choice(MOTIONS[motion])
        caption += f" that is {words}" if rng.random() < 0.1 else f" {words}"
    if background != "white" or rng.random() < 0.15:
        caption += background_phrase(background, rng)
    if rng.random() < 0.1:
        caption = rng.choice(("a video of ", "an animation of ", "show me ", "make a video of ")) + caption
    if rng.random() < 0.05:
        caption += "."
    return VideoScene(caption, index, motion, make_track(motion, frames, rng), background, color)


def plain_scene(
    things: tuple[Thing, ...], index: int, motion: str, rng: random.Random, frames: int = FRAMES
) -> VideoScene:
    """Return an evaluation scene on white: `a rocket flying to the left`, `a rocket spinning`."""
    words = "" if motion == STILL else f" {MOTIONS[motion][0]}"
    return VideoScene(with_article(things[index].name) + words, index, motion, make_track(motion, frames, rng))


def as_video_batch(scenes: list[VideoScene], tokenizer: Any) -> VideoBatch:
    """Convert scenes to tensors."""
    tokens = tokenizer([s.caption for s in scenes], padding="max_length", truncation=True, return_tensors="pt")
    return VideoBatch(
        torch.tensor([scene.thing for scene in scenes]),
        torch.tensor([_color_index(scene) for scene in scenes]),
        torch.from_numpy(np.stack([scene.track for scene in scenes])),
        torch.tensor([BACKGROUNDS[scene.background] for scene in scenes]) / 255,
        tokens.input_ids,
    )


def _color_index(scene: VideoScene) -> int:
    return list(COLORS).index(scene.color) if scene.color else -1


def draw_video(composer: Composer, batch: VideoBatch) -> torch.Tensor:
    """Return the frames [B × frames, 3, height, width] of a batch on the composer's device, from -1 to 1."""
    frames = batch.tracks.shape[1]
    x_y, size, angle, opacity = batch.tracks.flatten(0, 1).split((2, 1, 1, 1), dim=1)
    things, recolors = (indices.repeat_interleave(frames) for indices in (batch.things, batch.recolors))
    drawn = composer.draw_glyphs(things, x_y, size[:, 0], angle[:, 0], recolors) * opacity[:, :, None, None]
    background = batch.colors.repeat_interleave(frames, 0)[:, :, None, None]
    video: torch.Tensor = (drawn[:, :3] + background * (1 - drawn[:, 3:])) * 2 - 1
    return video


def draw_scene_frames(composer: Composer, scene: VideoScene) -> torch.Tensor:
    """Return the frames of a scene [frames, 3, height, width], from -1 to 1."""
    batch = VideoBatch(
        torch.tensor([scene.thing]), torch.tensor([_color_index(scene)]), torch.from_numpy(scene.track)[None],
        torch.tensor([BACKGROUNDS[scene.background]]) / 255, torch.empty(0),
    )  # fmt: skip
    return draw_video(composer, batch.to(composer.levels.device))


def as_frames(images: torch.Tensor) -> list[Image.Image]:
    """Convert frames to images."""
    pixels = ((images.permute(0, 2, 3, 1) + 1) * 127.5).round().clamp(0, 255).byte().cpu().numpy()
    return [Image.fromarray(frame) for frame in pixels]


def render_video(composer: Composer, scene: VideoScene) -> list[Image.Image]:
    """Return the frames of a scene as images."""
    return as_frames(draw_scene_frames(composer, scene))


class _VideoStream(torch.utils.data.IterableDataset[VideoBatch]):
    """Endless batches of random scenes from a seed; each worker process draws different ones."""

    def __init__(self, things: tuple[Thing, ...], tokenizer: Any, size: int, seed: int, choice: dict[str, Any]) -> None:
        self.things, self.tokenizer, self.size, self.seed, self.choice = things, tokenizer, size, seed, choice

    def __iter__(self) -> Iterator[VideoBatch]:
        worker = torch.utils.data.get_worker_info()
        rng = random.Random(self.seed * 1000 + (worker.id if worker else 0))
        while True:
            scenes = [draw_video_scene(self.things, rng, **self.choice) for _ in range(self.size)]
            yield as_video_batch(scenes, self.tokenizer)


def video_batches(
    things: tuple[Thing, ...], tokenizer: Any, size: int, seed: int, workers: int, **choice: Any
) -> Iterator[VideoBatch]:
    """Return an iterator of batches, prefetched by worker processes; `choice` is passed to `draw_video_scene`."""
    stream = _VideoStream(things, tokenizer, size, seed, choice)
    prefetch: dict[str, Any] = {"prefetch_factor": 8, "multiprocessing_context": "fork"} if workers else {}
    pin = torch.accelerator.is_available()
    return iter(torch.utils.data.DataLoader(stream, batch_size=None, num_workers=workers, pin_memory=pin, **prefetch))
