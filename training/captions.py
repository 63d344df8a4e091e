"""Random scenes and their captions: `a small cat and a pizza on a dark blue background`."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from anyaccel.embedded.judge import BACKGROUNDS
from anyaccel.embedded.motion import MOTIONS
from training.colors import differs_from, spellings
from training.things import Thing, make_plural

__all__ = [
    "IMAGE_PIXELS",
    "Object",
    "Scene",
    "background_phrase",
    "choose_color",
    "colored",
    "draw_background",
    "draw_scene",
    "in_motion",
    "jitter",
    "pair",
    "phrase",
    "single",
    "triple",
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
_PAIR = ((33, 64), (95, 64))
_TRIANGLE = ((64, 35), (34, 92), (94, 92))
_COUNTS = {"two": (_PAIR, {"": 54, "small ": 36}), "three": (_TRIANGLE, {"": 46, "small ": 36})}
_THREE_SHARE = 0.63  # of the scenes with several of the same thing
_COLOR_SHARE, _COLOR_SHARE_OF_TWO = 0.14, 0.07  # of the things get another color
_MOTION_SHARE = 0.08  # of the captions of one thing name a motion, so that the text encoder knows the words
_SIZE_WORDS = {"small ": ("small ", "tiny ", "little "), "large ": ("large ", "big ", "huge "), "": ("",)}


@dataclass(frozen=True)
class Object:
    """One glyph in an image: index, center and side length in pixels, and color if it is not the natural one."""

    thing: int
    x: float
    y: float
    size: float
    color: str | None = None


@dataclass(frozen=True)
class Scene:
    """Caption and layout of an image."""

    caption: str
    objects: tuple[Object, ...]
    background: str = field(default="white")


def draw_scene(things: tuple[Thing, ...], rng: random.Random) -> Scene:
    """Return a random scene: mostly one thing, often two, sometimes two or three of the same thing."""
    background = draw_background(rng)
    draw = rng.random()
    compose = _one if draw < 0.50 else _two if draw < 0.84 else _several
    caption, objects = compose(things, background, rng)
    if background != "white" or rng.random() < 0.15:
        caption += background_phrase(background, rng)
    if rng.random() < 0.08:
        caption = rng.choice(_PREFIXES) + caption
    if rng.random() < 0.10:
        caption += rng.choice(_ENDS)
    return Scene(caption, objects, background)


def draw_background(rng: random.Random) -> str:
    """Return the name of a random background, most often white."""
    return "white" if rng.random() < 0.55 else rng.choice(list(BACKGROUNDS))


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


def colored(things: tuple[Thing, ...], index: int, color: str) -> Scene:
    """Return an evaluation scene: `a blue apple`."""
    caption = with_article(f"{color} {things[index].recolors[color][0]}")
    return Scene(caption, (Object(index, _CENTER, _CENTER, _SIZES[""], color),))


def triple(things: tuple[Thing, ...], index: int) -> Scene:
    """Return an evaluation scene: `three rockets`."""
    positions, sizes = _COUNTS["three"]
    caption = f"three {make_plural(things[index].name)}"
    return Scene(caption, tuple(Object(index, x, y, sizes[""]) for x, y in positions))


def in_motion(things: tuple[Thing, ...], index: int, motion: str) -> Scene:
    """Return an evaluation scene of which an image can show only the thing: `a rocket flying to the left`."""
    scene = single(things, index)
    return replace(scene, caption=f"{scene.caption} {MOTIONS[motion][0]}")


def choose_color(thing: Thing, background: str, share: float, rng: random.Random) -> str | None:
    """Return a color that the thing does not have naturally, for a share of the things."""
    if rng.random() >= share:
        return None
    colors = [color for color in thing.recolors if differs_from(color, background)]
    return rng.choice(colors) if colors else None


def _one(things: tuple[Thing, ...], background: str, rng: random.Random) -> tuple[str, tuple[Object, ...]]:
    index = rng.randrange(len(things))
    size_word = rng.choice(list(_SIZES)) if rng.random() < 0.35 else ""
    color = choose_color(things[index], background, _COLOR_SHARE, rng)
    caption = phrase(things[index], size_word, rng, color)
    x, y, size = _CENTER, _CENTER, float(_SIZES[size_word])
    if size_word == "" and rng.random() < _MOTION_SHARE / 0.65:
        caption += f" {rng.choice(MOTIONS[rng.choice(list(MOTIONS))])}"
        x, y = x + rng.uniform(-5, 5), y + rng.uniform(-5, 5)
    elif size_word != "large " and rng.random() < 0.12:
        side, x = rng.choice([("left", 34.0), ("right", 94.0)])
        size = min(size, 60.0)
        caption += f" on the {side}"
    return caption, (jitter(Object(index, x, y, size, color), rng),)


def _two(things: tuple[Thing, ...], background: str, rng: random.Random) -> tuple[str, tuple[Object, ...]]:
    chosen = [rng.randrange(len(things)) for _ in range(2)]
    sizes = [rng.choice(list(_SIZES_OF_TWO)) if rng.random() < 0.2 else "" for _ in range(2)]
    colors = [choose_color(things[index], background, _COLOR_SHARE_OF_TWO, rng) for index in chosen]
    rows = list(zip(chosen, sizes, colors, strict=True))
    left, right = (phrase(things[index], size, rng, color) for index, size, color in rows)
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
    positions = _PAIR[::-1] if swapped else _PAIR
    objects = [
        Object(index, *position, _SIZES_OF_TWO[size], color)
        for (index, size, color), position in zip(rows, positions, strict=True)
    ]
    return caption, tuple(jitter(item, rng) for item in objects)


def _several(things: tuple[Thing, ...], background: str, rng: random.Random) -> tuple[str, tuple[Object, ...]]:
    index = rng.randrange(len(things))
    color = choose_color(things[index], background, _COLOR_SHARE, rng)
    number = "three" if rng.random() < _THREE_SHARE else "two"
    positions, sizes = _COUNTS[number]
    size_word = rng.choice(list(sizes))
    quantity = rng.choice(("", "some ", "several ", "a few ")) if rng.random() < 0.2 else f"{number} "
    name = make_plural(_name_with_adjective(things[index], rng, color))
    objects = [Object(index, x, y, sizes[size_word], color) for x, y in positions]
    return f"{quantity}{rng.choice(_SIZE_WORDS[size_word])}{name}", tuple(jitter(item, rng) for item in objects)


def _name(thing: Thing, rng: random.Random) -> str:
    return thing.name if rng.random() < 0.6 else rng.choice(thing.names)


def _name_with_adjective(thing: Thing, rng: random.Random, color: str | None) -> str:
    """Return the name of a thing with its color if it is recolored, else sometimes (`red rose`), or an adjective."""
    if color:
        names = thing.recolors[color]
        return f"{rng.choice(spellings(color))} {names[0] if rng.random() < 0.6 else rng.choice(names)}"
    name = _name(thing, rng)
    if thing.color and thing.color not in name.split() and rng.random() < 0.08:
        return f"{thing.color} {name}"
    return rng.choice(_PRAISE) + name if rng.random() < 0.03 else name


def phrase(thing: Thing, size_word: str, rng: random.Random, color: str | None = None) -> str:
    """Return a random phrase for a thing: `a rocket`, `the small blue rocket`, `🚀`."""
    if color is None and rng.random() < 0.025:
        return thing.glyph
    name = rng.choice(_SIZE_WORDS[size_word]) + _name_with_adjective(thing, rng, color)
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
    x, y = item.x + rng.uniform(-2, 2), item.y + rng.uniform(-2, 2)
    return replace(item, x=x, y=y, size=item.size * rng.uniform(0.97, 1.03))
