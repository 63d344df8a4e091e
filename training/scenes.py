"""Composing pictures of scenes on the training device, and the stream of scenes that feeds it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses

from anyaccel.embedded.judge import BACKGROUNDS
from training.captions import PICTURE_PIXELS, Scene, draw_scene
from training.things import Thing

__all__ = ["Batch", "Composer", "SceneStream", "as_batch", "scene_batches"]

_MOST_OBJECTS = 3


@dataclass(frozen=True)
class Batch:
    """Scenes as tensors: `things` [B, 3] (-1: none), `places` [B, 3, 3] (x, y, size), `colours` [B, 3], `tokens`."""

    things: torch.Tensor
    places: torch.Tensor
    colours: torch.Tensor
    tokens: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(*(part.to(device, non_blocking=True) for part in self._parts()))

    def pin_memory(self) -> Batch:
        """The same in memory that a GPU copies from while it computes; other memory makes it wait."""
        return Batch(*(part.pin_memory() for part in self._parts()))

    def _parts(self) -> tuple[torch.Tensor, ...]:
        return self.things, self.places, self.colours, self.tokens


def as_batch(scenes: list[Scene], tokenizer: Any) -> Batch:
    """Scenes as tensors; the tokenizer pads captions to its own length."""
    things = np.full((len(scenes), _MOST_OBJECTS), -1, np.int64)
    places = np.ones((len(scenes), _MOST_OBJECTS, 3), np.float32)
    for row, scene in enumerate(scenes):
        for column, one in enumerate(scene.objects):
            things[row, column] = one.thing
            places[row, column] = (one.x, one.y, one.size)
    colours = np.asarray([BACKGROUNDS[scene.background] for scene in scenes], np.float32) / 255
    tokens = tokenizer(
        [s.caption for s in scenes], padding="max_length", truncation=True, return_tensors="pt"
    ).input_ids
    return Batch(torch.from_numpy(things), torch.from_numpy(places), torch.from_numpy(colours), tokens)


class SceneStream(torch.utils.data.IterableDataset[Batch]):
    """Scenes without end, in batches, drawn from a seed; a worker process each draws others."""

    def __init__(self, things: tuple[Thing, ...], tokenizer: Any, size: int, seed: int) -> None:
        self.things, self.tokenizer, self.size, self.seed = things, tokenizer, size, seed

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        chance = random.Random(self.seed * 1000 + (worker.id if worker else 0))
        while True:
            yield as_batch([draw_scene(self.things, chance) for _ in range(self.size)], self.tokenizer)


def scene_batches(things: tuple[Thing, ...], tokenizer: Any, size: int, seed: int, workers: int) -> Iterator[Batch]:
    """Batches of scenes, drawn ahead by worker processes."""
    stream = SceneStream(things, tokenizer, size, seed)
    ahead: dict[str, Any] = {"prefetch_factor": 8, "multiprocessing_context": "fork"} if workers else {}
    pin = torch.accelerator.is_available()
    return iter(torch.utils.data.DataLoader(stream, batch_size=None, num_workers=workers, pin_memory=pin, **ahead))


class Composer:
    """Draws scenes: glyphs scaled and laid over a background, as pictures from -1 to 1."""

    def __init__(self, glyphs: np.ndarray[Any, Any], device: torch.device) -> None:
        """`glyphs` [N, 128, 128, 4], uint8."""
        whole = torch.from_numpy(glyphs).permute(0, 3, 1, 2).contiguous()
        # Three sharpnesses: a glyph drawn at a third of its size must not alias.
        self.levels = torch.stack([_soften(whole, factor) for factor in (1, 2, 4)]).to(device)
        axis = torch.arange(PICTURE_PIXELS, device=device) + 0.5
        self.pixels = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)

    def draw(self, batch: Batch) -> torch.Tensor:
        """The pictures of a batch that lies on this device."""
        picture = batch.colours[:, :, None, None].expand(-1, -1, PICTURE_PIXELS, PICTURE_PIXELS)
        for column in range(_MOST_OBJECTS):
            thing, place = batch.things[:, column], batch.places[:, column]
            size = place[:, 2]
            level = (size < 80).long() + (size < 40).long()
            glyph = self.levels[level, thing.clamp(min=0)].float() / 255
            grid = (self.pixels[None] - place[:, None, None, :2]) / (size[:, None, None, None] / 2)
            premultiplied = torch.cat([glyph[:, :3] * glyph[:, 3:], glyph[:, 3:]], 1)
            drawn = F.grid_sample(premultiplied, grid, mode="bilinear", align_corners=False)
            drawn = drawn * (thing >= 0)[:, None, None, None]
            picture = drawn[:, :3] + picture * (1 - drawn[:, 3:])
        return picture * 2 - 1


def _soften(glyphs: torch.Tensor, factor: int) -> torch.Tensor:
    """Glyphs with the detail of a size smaller by a factor, at the same number of pixels."""
    if factor == 1:
        return glyphs
    made = []
    for part in glyphs.split(64):
        real = part.float() / 255
        alpha = F.avg_pool2d(real[:, 3:], factor)
        colour = F.avg_pool2d(real[:, :3] * real[:, 3:], factor) / alpha.clamp(min=1e-4)
        small = torch.cat([colour, alpha], 1)
        made.append((F.interpolate(small, scale_factor=factor, mode="bilinear") * 255).round().clamp(0, 255).byte())
    return torch.cat(made)
