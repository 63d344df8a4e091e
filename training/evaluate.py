"""The measure: whether the thing is there that was asked for, on its background and on its side."""

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
"""Makes pictures of prompts with a seed each."""


@dataclass(frozen=True)
class Figures:
    """Shares of 1, over so many pictures."""

    single: float
    single_pictures: int
    single_top5: float
    background: float
    background_pictures: int
    pair: float
    pair_pictures: int
    pair_each: float
    """Of the single things in pairs, on its side, how many were right."""

    def as_json(self) -> dict[str, float | int]:
        """For a file."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def judge_scenes(things: tuple[Thing, ...], count: int, seed: int = _SEED) -> dict[str, list[Scene]]:
    """The scenes of the evaluation: drawn by a fixed seed from all that were trained."""
    if not 1 <= count <= len(things):
        raise UsageError(f"{count} of {len(things)} things cannot be asked for", hint="for example --things 300")
    chance = random.Random(seed)
    chosen = chance.sample(range(len(things)), count)
    colours = list(BACKGROUNDS)
    return {
        "single": [single(things, index) for index in chosen],
        "background": [single(things, index, colours[place % len(colours)]) for place, index in enumerate(chosen)],
        "pair": [pair(things, *chance.sample(range(len(things)), 2)) for _ in range(count)],
    }


def evaluate(
    things: tuple[Thing, ...], draw: Draw, count: int = 300, seeds: tuple[int, ...] = _SEEDS, batch: int = 100
) -> tuple[Figures, list[tuple[str, str]]]:
    """The figures, and every single thing that was not recognised: what was asked and what was seen."""
    judge = load_judge()
    scenes = judge_scenes(things, count)
    top1 = top5 = backgrounds = pairs = halves = 0
    missed = []
    for scene, picture in _pictures(scenes["single"], seeds, draw, batch):
        wanted = judge.groups[scene.objects[0].thing]
        verdict = judge.classify(picture)
        top1 += verdict.groups[:1] == (wanted,)
        top5 += wanted in verdict.groups
        if verdict.groups[:1] != (wanted,):
            missed.append((scene.caption, verdict.names[0] if verdict.names else "nothing"))
    for scene, picture in _pictures(scenes["background"], seeds[:1], draw, batch):
        backgrounds += judge.background(picture) == scene.background
    for scene, picture in _pictures(scenes["pair"], seeds[:1], draw, batch):
        left, right = scene.objects
        seen = (_is_there(judge, picture, "left", left.thing), _is_there(judge, picture, "right", right.thing))
        halves += sum(seen)
        pairs += all(seen)
    all_singles = count * len(seeds)
    figures = Figures(
        single=top1 / all_singles,
        single_pictures=all_singles,
        single_top5=top5 / all_singles,
        background=backgrounds / count,
        background_pictures=count,
        pair=pairs / count,
        pair_pictures=count,
        pair_each=halves / (2 * count),
    )
    return figures, missed


def _is_there(judge: Judge, picture: Image.Image, side: str, thing: int) -> bool:
    return judge.classify(picture, side).groups[:1] == (judge.groups[thing],)


def _pictures(
    scenes: list[Scene], seeds: tuple[int, ...], draw: Draw, batch: int
) -> Iterator[tuple[Scene, Image.Image]]:
    asked = [(scene, seed) for seed in seeds for scene in scenes]
    for start in range(0, len(asked), batch):
        part = asked[start : start + batch]
        made: list[Any] = draw([scene.caption for scene, _ in part], [seed for _, seed in part])
        yield from ((scene, picture) for (scene, _), picture in zip(part, made, strict=True))
