"""Evaluation: whether a judge recognizes the requested thing, background and position."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from PIL import Image

from anyaccel.embedded.judge import BACKGROUNDS, Judge, load_judge
from anyaccel.errors import UsageError
from training.captions import Scene, pair, single
from training.things import Thing

__all__ = ["Figures", "evaluate", "judge_scenes"]

_SEED = 20261115
_SEEDS = (0, 1, 2)

Draw = Callable[[list[str], list[int]], list[Image.Image]]
"""Function that generates one image per prompt and seed."""


@dataclass(frozen=True)
class Figures:
    """Accuracies from 0 to 1, and the number of images for each."""

    single: float
    single_pictures: int
    single_top5: float
    background: float
    background_pictures: int
    pair: float
    pair_pictures: int
    pair_each: float
    """Accuracy for each thing of a pair on its own side."""

    def as_json(self) -> dict[str, float | int]:
        """Return the rounded values for JSON."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def judge_scenes(things: tuple[Thing, ...], count: int, seed: int = _SEED) -> dict[str, list[Scene]]:
    """Return the evaluation scenes, drawn with a fixed seed from all trained things."""
    if not 1 <= count <= len(things):
        raise UsageError(f"cannot select {count} of {len(things)} things", hint="for example --things 300")
    rng = random.Random(seed)
    chosen = rng.sample(range(len(things)), count)
    colors = list(BACKGROUNDS)
    return {
        "single": [single(things, index) for index in chosen],
        "background": [single(things, index, colors[position % len(colors)]) for position, index in enumerate(chosen)],
        "pair": [pair(things, *rng.sample(range(len(things)), 2)) for _ in range(count)],
    }


def evaluate(
    things: tuple[Thing, ...], draw: Draw, count: int = 300, seeds: tuple[int, ...] = _SEEDS, batch: int = 100
) -> tuple[Figures, list[tuple[str, str]]]:
    """Return the metrics, and the caption and first answer for every single thing that was not recognized."""
    judge = load_judge()
    scenes = judge_scenes(things, count)
    top1 = top5 = backgrounds = pairs = sides = 0
    missed = []
    for scene, image in _generate(scenes["single"], seeds, draw, batch):
        expected = judge.groups[scene.objects[0].thing]
        verdict = judge.classify(image)
        top1 += verdict.groups[:1] == (expected,)
        top5 += expected in verdict.groups
        if verdict.groups[:1] != (expected,):
            missed.append((scene.caption, verdict.names[0] if verdict.names else "nothing"))
    for scene, image in _generate(scenes["background"], seeds[:1], draw, batch):
        backgrounds += judge.background(image) == scene.background
    for scene, image in _generate(scenes["pair"], seeds[:1], draw, batch):
        left, right = scene.objects
        correct = (_is_recognized(judge, image, "left", left.thing), _is_recognized(judge, image, "right", right.thing))
        sides += sum(correct)
        pairs += all(correct)
    single_count = count * len(seeds)
    figures = Figures(
        single=top1 / single_count,
        single_pictures=single_count,
        single_top5=top5 / single_count,
        background=backgrounds / count,
        background_pictures=count,
        pair=pairs / count,
        pair_pictures=count,
        pair_each=sides / (2 * count),
    )
    return figures, missed


def _is_recognized(judge: Judge, image: Image.Image, side: str, thing: int) -> bool:
    return judge.classify(image, side).groups[:1] == (judge.groups[thing],)


def _generate(
    scenes: list[Scene], seeds: tuple[int, ...], draw: Draw, batch: int
) -> Iterator[tuple[Scene, Image.Image]]:
    requests = [(scene, seed) for seed in seeds for scene in scenes]
    for start in range(0, len(requests), batch):
        chunk = requests[start : start + batch]
        images: list[Any] = draw([scene.caption for scene, _ in chunk], [seed for _, seed in chunk])
        yield from ((scene, image) for (scene, _), image in zip(chunk, images, strict=True))
