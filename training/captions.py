"""Random scenes and their captions: `a small cat and a pizza on a dark blue background`."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from anyaccel.embedded.judge import BACKGROUNDS
from training.things import Thing, make_plural

__all__ = [
    "IMAGE_PIXELS",
    "Object",
    "Scene",
    "background_phrase",
    "draw_scene",
    "jitter",
    "pair",
    "phrase",
    "single",
    "with_article",
]

IMAGE_PIXELS = 128
_CENTER = IMAGE_PIXELS / 2
_COLOR_ALIASES = {"grey": "gray"}
_PREFIXES: tuple[str, ...] = ("a picture of ", "an emoji of ", "a drawing of ", "an icon of ", "a photo of ", "one ")
_PREFIXES += ("an image of ", "draw ", "draw me ", "please draw ", "please draw me ", "show me ", "paint ", "make ")
_PREFIXES += ("create ", "i want ", "generate ", "give me ", "i want a picture of ", "can you draw ", "there is ")
_PREFIXES += ("please make a picture of ",)
_PRAISE = ("cute ", "beautiful ", "nice ", "pretty ", "lovely ", "simple ", "colorful ", "happy ", "cool ", "single ")
_ENDS = (".", ".", ".", ".", "!", "?", ",", " please", ", please")
_SIZES = {"": 88, "small ": 47, "large ": 114}
_SIZES_OF_TWO = {"": 56, "small ": 38, "large ": 60}
_COUNTS = {"two": ((33, 95), {"": 54, "small ": 36}), "three": ((24, 64, 104), {"": 38, "small ": 29})}
_SIZE_WORDS = {"small ": ("small ", "tiny ", "little "), "large ": ("large ", "big ", "huge "), "": ("",)}


@dataclass(frozen=True)
class Object:
    """One glyph in an image: index, center and side length in pixels."""

    thing: int
    x: float
    y: float
    size: float


@dataclass(frozen=True)
class Scene:
    """Caption and layout of an image."""

    caption: str
    objects: tuple[Object, ...]
    background: str = field(default="white")


def draw_scene(things: tuple[Thing, ...], rng: random.Random) -> Scene:
    """Return a random scene: mostly one thing, often two, sometimes two or three of the same thing."""
    draw = rng.random()
    if draw < 0.52:
        caption, objects = _one(things, rng)
    elif draw < 0.88:
        caption, objects = _two(things, rng)
    else:
        caption, objects = _several(things, rng)
    background = "white" if rng.random() < 0.55 else rng.choice(list(BACKGROUNDS))
    if background != "white" or rng.random() < 0.15:
        caption += background_phrase(background, rng)
    if rng.random() < 0.08:
        caption = rng.choice(_PREFIXES) + caption
    if rng.random() < 0.10:
        caption += rng.choice(_ENDS)
    return Scene(caption, objects, background)


def single(things: tuple[Thing, ...], index: int, background: str = "white") -> Scene:
    """Return an evaluation scene: `a rocket`, `a rocket on a dark blue background`."""
    caption = with_article(things[index].name)
    if background != "white":
        caption += f" on a{'n' if background[0] in 'aeiou' else ''} {background} background"
    return Scene(caption, (Object(index, _CENTER, _CENTER, _SIZES[""]),), background)


def pair(things: tuple[Thing, ...], left: int, right: int) -> Scene:
    """Return an evaluation scene with two things: `a cat and a pizza`, the first on the left."""
    caption = f"{with_article(things[left].name)} and {with_article(things[right].name)}"
    size = _SIZES_OF_TWO[""]
    return Scene(caption, (Object(left, 33, _CENTER, size), Object(right, 95, _CENTER, size)))


def _one(things: tuple[Thing, ...], rng: random.Random) -> tuple[str, tuple[Object, ...]]:
    index = rng.randrange(len(things))
    size_word = rng.choice(list(_SIZES)) if rng.random() < 0.35 else ""
    caption = phrase(things[index], size_word, rng)
    x, size = _CENTER, float(_SIZES[size_word])
    if size_word != "large " and rng.random() < 0.12:
        side, x = rng.choice([("left", 34.0), ("right", 94.0)])
        size = min(size, 60.0)
        caption += f" on the {side}"
    return caption, (jitter(Object(index, x, _CENTER, size), rng),)


def _two(things: tuple[Thing, ...], rng: random.Random) -> tuple[str, tuple[Object, ...]]:
    first, second = rng.randrange(len(things)), rng.randrange(len(things))
    sizes = [rng.choice(list(_SIZES_OF_TWO)) if rng.random() < 0.2 else "" for _ in range(2)]
    left, right = (phrase(things[i], size, rng) for i, size in ((first, sizes[0]), (second, sizes[1])))
    caption, swapped = rng.choices(
        [
            (f"{left} and {right}", False),
            (f"{left} & {right}", False),
            (f"{left}, {right}", False),
            (f"{left} with {right}", False),
            (f"{left} beside {right}", False),
            (f"{left} on the left and {right} on the right", False),
            (f"{left} on the right and {right} on the left", True),
            (f"{left} next to {right}", False),
            (f"{left} to the left of {right}", False),
            (f"{left} to the right of {right}", True),
        ],
        weights=[12, 1, 1, 1, 1, 4, 2, 2, 2, 2],
    )[0]
    positions = (95.0, 33.0) if swapped else (33.0, 95.0)
    objects = (
        Object(index, x, _CENTER, _SIZES_OF_TWO[size])
        for index, x, size in zip((first, second), positions, sizes, strict=True)
    )
    return caption, tuple(jitter(item, rng) for item in objects)


def _several(things: tuple[Thing, ...], rng: random.Random) -> tuple[str, tuple[Object, ...]]:
    index = rng.randrange(len(things))
    number = rng.choice(list(_COUNTS))
    positions, sizes = _COUNTS[number]
    size_word = rng.choice(list(sizes))
    quantity = rng.choice(("", "some ", "several ", "a few ")) if rng.random() < 0.2 else f"{number} "
    caption = f"{quantity}{rng.choice(_SIZE_WORDS[size_word])}{make_plural(_name_with_adjective(things[index], rng))}"
    return caption, tuple(jitter(Object(index, x, _CENTER, sizes[size_word]), rng) for x in positions)


def _name(thing: Thing, rng: random.Random) -> str:
    return thing.name if rng.random() < 0.6 else rng.choice(thing.names)


def _name_with_adjective(thing: Thing, rng: random.Random) -> str:
    """Return the name of a thing, sometimes with its color (`red rose`) or a positive adjective."""
    name = _name(thing, rng)
    if thing.color and thing.color not in name.split() and rng.random() < 0.08:
        return f"{thing.color} {name}"
    return rng.choice(_PRAISE) + name if rng.random() < 0.03 else name


def phrase(thing: Thing, size_word: str, rng: random.Random) -> str:
    """Return a random phrase for a thing: `a rocket`, `the small rocket`, `🚀`."""
    if rng.random() < 0.025:
        return thing.glyph
    name = rng.choice(_SIZE_WORDS[size_word]) + _name_with_adjective(thing, rng)
    draw = rng.random()
    if draw < 0.75:
        return with_article(name)
    return name if draw < 0.93 else f"the {name}"


def with_article(name: str) -> str:
    """Return `a rocket`, `an apple`."""
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def background_phrase(background: str, rng: random.Random) -> str:
    """Return a random phrase for a background: ` on black`, ` on a black background`."""
    word = _COLOR_ALIASES.get(background, background) if rng.random() < 0.3 else background
    if rng.random() < 0.25:
        return f" on {word}"
    return f" on a{'n' if word[0] in 'aeiou' else ''} {word} background"


def jitter(item: Object, rng: random.Random) -> Object:
    """Return the object with its center moved by up to 2 pixels and its size changed by up to 3 %."""
    size = item.size * rng.uniform(0.97, 1.03)
    return Object(item.thing, item.x + rng.uniform(-2, 2), item.y + rng.uniform(-2, 2), size)
