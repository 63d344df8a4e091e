"""Judge for the color of a thing: comparison with its glyph in every color."""

from __future__ import annotations

import functools
import random

import numpy as np
import torch
from PIL import Image

from anyaccel.embedded.judge import Judge, load_judge
from training.captions import Object
from training.colors import COLORS, ColorTable
from training.things import Thing

__all__ = ["choose_recolors", "find_color", "is_thing_in_color"]

_NATURAL = "natural"
_MIN_DISTANCE = 0.15  # between the natural glyph and the glyph in a requested color, so that the judge can decide


def find_color(image: Image.Image, thing: int) -> str:
    """Return the color (a key of `COLORS`) in which the thing is drawn, or `natural`."""
    names = [_NATURAL, *COLORS]
    glyphs = [load_judge().glyphs[thing], *(_recolored_glyphs(color)[thing] for color in COLORS)]
    verdict = Judge(np.stack(glyphs), names, list(range(len(names)))).classify(image)
    return (*verdict.names, "nothing")[0]


def is_thing_in_color(image: Image.Image, item: Object) -> bool:
    """Return whether an image shows this thing, among all things in the requested color."""
    assert item.color
    judge = _judge_of_color(item.color)
    return judge.classify(image).groups[:1] == (judge.groups[item.thing],)


def choose_recolors(things: tuple[Thing, ...], count: int, rng: random.Random) -> list[tuple[int, str]]:
    """Return random things with a color each that differs visibly from their natural color."""
    choices: list[tuple[int, str]] = []
    while len(choices) < count:
        index = rng.randrange(len(things))
        colors = [color for color in things[index].recolors if _distance(index, color) > _MIN_DISTANCE]
        if colors:
            choices.append((index, rng.choice(colors)))
    return choices


def _distance(thing: int, color: str) -> float:
    """Return the mean difference of a glyph's pixels from the recolored ones."""
    natural = load_judge().glyphs[thing]
    difference = np.abs(natural[..., :3] - _recolored_glyphs(color)[thing][..., :3]).max(-1)
    return float(np.average(difference, weights=natural[..., 3]))


@functools.cache
def _judge_of_color(color: str) -> Judge:
    judge = load_judge()
    return Judge(_recolored_glyphs(color), judge.names, judge.groups)


@functools.cache
def _color_table() -> ColorTable:
    return ColorTable(torch.from_numpy(load_judge().glyphs).permute(0, 3, 1, 2))


@functools.cache
def _recolored_glyphs(color: str) -> np.ndarray:
    """Return the judge's glyphs in a color."""
    glyphs = torch.from_numpy(load_judge().glyphs).permute(0, 3, 1, 2)
    index = list(COLORS).index(color)
    drawn = torch.cat([glyphs[:, :3] * glyphs[:, 3:], glyphs[:, 3:]], 1)
    rows = zip(drawn.split(64), torch.arange(len(glyphs)).split(64), strict=True)
    colored = torch.cat([_color_table().apply(part, thing, torch.full_like(thing, index)) for part, thing in rows])
    straight = torch.cat([colored[:, :3] / colored[:, 3:].clamp(min=1e-3), colored[:, 3:]], 1)
    return straight.permute(0, 2, 3, 1).clamp(0, 1).numpy()
