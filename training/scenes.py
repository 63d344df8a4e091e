"""Images of scenes, composed on the training device, and the stream of random scenes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from anyaccel.embedded.judge import BACKGROUNDS
from training.captions import IMAGE_PIXELS, Scene, draw_scene
from training.colors import COLORS, ColorTable
from training.things import Thing

__all__ = ["Batch", "Composer", "SceneStream", "as_batch", "scene_batches"]

_MAX_OBJECTS = 3


@dataclass(frozen=True)
class Batch:
    """Scenes as tensors: `colors` [B, 3] are those of the backgrounds, `tokens` [B, length] the captions."""

    things: torch.Tensor
    """[B, 3], -1: none"""
    boxes: torch.Tensor
    """[B, 3, 3]: x, y and size"""
    recolors: torch.Tensor
    """[B, 3]: index in `COLORS`, -1: natural colors"""
    colors: torch.Tensor
    tokens: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self._tensors()))

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory, from which a GPU can copy asynchronously."""
        return Batch(*(tensor.pin_memory() for tensor in self._tensors()))

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        return self.things, self.boxes, self.recolors, self.colors, self.tokens


def as_batch(scenes: list[Scene], tokenizer: Any) -> Batch:
    """Convert scenes to tensors; the tokenizer pads the captions."""
    things = np.full((len(scenes), _MAX_OBJECTS), -1, np.int64)
    boxes = np.ones((len(scenes), _MAX_OBJECTS, 3), np.float32)
    recolors, names = np.full_like(things, -1), list(COLORS)
    for row, scene in enumerate(scenes):
        for column, item in enumerate(scene.objects):
            things[row, column] = item.thing
            boxes[row, column] = (item.x, item.y, item.size)
            recolors[row, column] = names.index(item.color) if item.color else -1
    colors = np.asarray([BACKGROUNDS[scene.background] for scene in scenes], np.float32) / 255
    tokens = tokenizer(
        [s.caption for s in scenes], padding="max_length", truncation=True, return_tensors="pt"
    ).input_ids
    convert = torch.from_numpy
    return Batch(convert(things), convert(boxes), convert(recolors), convert(colors), tokens)


class SceneStream(torch.utils.data.IterableDataset[Batch]):
    """Endless batches of random scenes from a seed; each worker process draws different ones."""

    def __init__(self, things: tuple[Thing, ...], tokenizer: Any, size: int, seed: int) -> None:
        self.things, self.tokenizer, self.size, self.seed = things, tokenizer, size, seed

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        rng = random.Random(self.seed * 1000 + (worker.id if worker else 0))
        while True:
            yield as_batch([draw_scene(self.things, rng) for _ in range(self.size)], self.tokenizer)


def scene_batches(things: tuple[Thing, ...], tokenizer: Any, size: int, seed: int, workers: int) -> Iterator[Batch]:
    """Return an iterator of batches, prefetched by worker processes."""
    stream = SceneStream(things, tokenizer, size, seed)
    prefetch: dict[str, Any] = {"prefetch_factor": 8, "multiprocessing_context": "fork"} if workers else {}
    pin = torch.accelerator.is_available()
    return iter(torch.utils.data.DataLoader(stream, batch_size=None, num_workers=workers, pin_memory=pin, **prefetch))


class Composer:
    """Composes images with values from -1 to 1: scaled glyphs over a background."""

    def __init__(self, glyphs: np.ndarray[Any, Any], device: torch.device) -> None:
        """`glyphs` [N, 128, 128, 4], uint8."""
        full = torch.from_numpy(glyphs).permute(0, 3, 1, 2).contiguous()
        # Three levels of detail, like mipmaps: small glyphs must not alias.
        self.levels = torch.stack([_downsample(full, factor) for factor in (1, 2, 4)]).to(device)
        self.colors = ColorTable(self.levels[0].float() / 255)
        axis = torch.arange(IMAGE_PIXELS, device=device) + 0.5
        self.pixels = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)

    def draw(self, batch: Batch) -> torch.Tensor:
        """Return the images of a batch on this device."""
        image = batch.colors[:, :, None, None].expand(-1, -1, IMAGE_PIXELS, IMAGE_PIXELS)
        for column in range(_MAX_OBJECTS):
            thing, box = batch.things[:, column], batch.boxes[:, column]
            drawn = self.draw_glyphs(thing.clamp(min=0), box[:, :2], box[:, 2], color=batch.recolors[:, column])
            drawn = drawn * (thing >= 0)[:, None, None, None]
            image = drawn[:, :3] + image * (1 - drawn[:, 3:])
        return image * 2 - 1

    def draw_glyphs(
        self,
        thing: torch.Tensor,
        center: torch.Tensor,
        size: torch.Tensor,
        angle: torch.Tensor | None = None,
        color: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return one glyph per image [B, 4, height, width], with premultiplied alpha.

        Angles [B] are in degrees; colors [B] are indices in `COLORS` or -1.
        """
        level = (size < 80).long() + (size < 40).long()
        glyph = self.levels[level, thing].float() / 255
        grid = (self.pixels[None] - center[:, None, None]) / (size[:, None, None, None] / 2)
        if angle is not None:
            radians = torch.deg2rad(angle)
            cosine, sine = radians.cos(), radians.sin()
            rotation = torch.stack([cosine, -sine, sine, cosine], 1).view(-1, 1, 2, 2)
            grid = grid @ rotation
        premultiplied = torch.cat([glyph[:, :3] * glyph[:, 3:], glyph[:, 3:]], 1)
        drawn = F.grid_sample(premultiplied, grid, mode="bilinear", align_corners=False)
        return drawn if color is None else self.colors.apply(drawn, thing, color)


def _downsample(glyphs: torch.Tensor, factor: int) -> torch.Tensor:
    """Return the glyphs with less detail, at the same number of pixels."""
    if factor == 1:
        return glyphs
    chunks = []
    for chunk in glyphs.split(64):
        values = chunk.float() / 255
        alpha = F.avg_pool2d(values[:, 3:], factor)
        color = F.avg_pool2d(values[:, :3] * values[:, 3:], factor) / alpha.clamp(min=1e-4)
        small = torch.cat([color, alpha], 1)
        chunks.append((F.interpolate(small, scale_factor=factor, mode="bilinear") * 255).round().clamp(0, 255).byte())
    return torch.cat(chunks)
