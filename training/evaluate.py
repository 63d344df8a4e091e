"""Evaluation: whether a judge recognizes the requested thing, color, background and position."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from PIL import Image

from anyaccel.embedded.judge import BACKGROUNDS, load_judge
from anyaccel.embedded.motion import MOTIONS
from anyaccel.errors import UsageError
from training.captions import Scene, colored, in_motion, pair, single, triple
from training.color_judge import choose_recolors, find_color, is_thing_in_color
from training.pool import map_in_processes
from training.things import Thing

__all__ = ["Draw", "evaluate", "judge_scenes"]

_SEED = 20261115
_SEEDS = (0, 1, 2)
_REGIONS = (
    ((32, 0, 96, 64), (0, 60, 64, 128), (64, 60, 128, 128)),  # a triangle
    ((0, 0, 44, 128), (44, 0, 84, 128), (84, 0, 128, 128)),  # a row, as the first model draws three things
)
"""Boxes of three things (left, top, right, bottom)."""

Draw = Callable[[list[str], list[int]], list[Image.Image]]
"""Function that generates one image per prompt and seed."""


def judge_scenes(things: tuple[Thing, ...], count: int, seed: int = _SEED) -> dict[str, list[Scene]]:
    """Return the evaluation scenes, drawn with a fixed seed from all trained things."""
    if not 1 <= count <= len(things):
        raise UsageError(f"cannot select {count} of {len(things)} things", hint="for example --things 300")
    rng = random.Random(seed)
    chosen = rng.sample(range(len(things)), count)
    colors, motions = list(BACKGROUNDS), list(MOTIONS)
    return {
        "single": [single(things, index) for index in chosen],
        "background": [single(things, index, colors[position % len(colors)]) for position, index in enumerate(chosen)],
        "pair": [pair(things, *rng.sample(range(len(things)), 2)) for _ in range(count)],
        "color": [colored(things, *choice) for choice in choose_recolors(things, count, rng)],
        "three": [triple(things, index) for index in chosen],
        "motion": [in_motion(things, index, motions[position % len(motions)]) for position, index in enumerate(chosen)],
    }


def evaluate(
    things: tuple[Thing, ...],
    draw: Draw,
    count: int = 300,
    seeds: tuple[int, ...] = _SEEDS,
    batch: int = 100,
    workers: int = 1,
) -> tuple[dict[str, float], list[tuple[str, str]]]:
    """Return the metrics, and the caption and first answer for every thing or color that was not recognized.

    The metrics are shares from 0 to 1, and the number of images for each.
    """
    answers: dict[str, list[dict[str, Any]]] = {}
    requests = [
        (kind, scene, seed)
        for kind, scenes in judge_scenes(things, count).items()
        for seed in (seeds if kind == "single" else seeds[:1])
        for scene in scenes
    ]
    missed = []
    verdicts = map_in_processes(_judge, _generate(requests, draw, batch), workers)
    for (kind, scene, _), verdict in zip(requests, verdicts, strict=True):
        answers.setdefault(kind, []).append(verdict)
        if not verdict["correct"]:
            missed.append((scene.caption, str(verdict["answer"])))
    figures: dict[str, float] = {}
    for kind, verdicts_of_kind in answers.items():
        figures[kind] = _share(verdicts_of_kind, "correct")
        figures[f"{kind}_images"] = len(verdicts_of_kind)
    figures["single_top5"] = _share(answers["single"], "top5")
    figures["pair_each"] = _share(answers["pair"], "each")
    figures["color_thing"] = _share(answers["color"], "thing")
    figures["three_each"] = _share(answers["three"], "each")
    return figures, missed


def _share(verdicts: list[dict[str, Any]], name: str) -> float:
    return round(float(np.mean([verdict[name] for verdict in verdicts])), 4)


def _generate(
    requests: list[tuple[str, Scene, int]], draw: Draw, batch: int
) -> Iterator[tuple[str, Scene, Image.Image]]:
    for start in range(0, len(requests), batch):
        chunk = requests[start : start + batch]
        images = draw([scene.caption for _, scene, _ in chunk], [seed for *_, seed in chunk])
        yield from ((kind, scene, image) for (kind, scene, _), image in zip(chunk, images, strict=True))


def _judge(kind: str, scene: Scene, image: Image.Image) -> dict[str, Any]:
    """Return the verdict on one image: `correct`, `answer` and other shares."""
    judge = load_judge()
    groups = [judge.groups[item.thing] for item in scene.objects]
    if kind == "background":
        background = judge.background(image)
        return {"correct": background == scene.background, "answer": background}
    if kind == "color":
        item = scene.objects[0]
        color = find_color(image, item.thing)
        return {"correct": color == item.color, "answer": color, "thing": is_thing_in_color(image, item)}
    if kind == "pair":
        found = [judge.classify(image, side) for side in ("left", "right")]
        right = [verdict.groups[:1] == (group,) for verdict, group in zip(found, groups, strict=True)]
        return {"correct": all(right), "answer": [verdict.names[:1] for verdict in found], "each": np.mean(right)}
    if kind == "three":
        layouts = [[judge.classify(image.crop(box)) for box in boxes] for boxes in _REGIONS]
        rows = [[verdict.groups[:1] == (groups[0],) for verdict in layout] for layout in layouts]
        best = max(range(len(rows)), key=lambda index: sum(rows[index]))
        answer = [verdict.names[:1] for verdict in layouts[best]]
        return {"correct": all(rows[best]), "answer": answer, "each": np.mean(rows[best])}
    verdict = judge.classify(image)
    correct = verdict.groups[:1] == (groups[0],)
    return {"correct": correct, "answer": (*verdict.names, "nothing")[0], "top5": groups[0] in verdict.groups}
