"""Scenes and what people would call them: `a small cat and a pizza on a dark blue background`."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from anyaccel.embedded.judge import BACKGROUNDS
from training.things import Thing, make_plural

__all__ = ["PICTURE_PIXELS", "Object", "Scene", "draw_scene", "jitter", "pair", "single"]

PICTURE_PIXELS = 128
_CENTRE = PICTURE_PIXELS / 2
_OTHER_WORDS = {"grey": "gray"}
_PREFIXES: tuple[str, ...] = ("a picture of ", "an emoji of ", "a drawing of ", "an icon of ", "a photo of ", "one ")
_PREFIXES += ("an image of ", "draw ", "draw me ", "please draw ", "please draw me ", "show me ", "paint ", "make ")
_PREFIXES += ("create ", "i want ", "generate ", "give me ", "i want a picture of ", "can you draw ", "there is ")
_PREFIXES += ("please make a picture of ",)
_PRAISE = ("cute ", "beautiful ", "nice ", "pretty ", "lovely ", "simple ", "colorful ", "happy ", "cool ", "single ")
_ENDS = (".", ".", ".", ".", "!", "?", ",", " please", ", please")
_SIZES = {"": 88, "small ": 47, "large ": 114}
_SIZES_OF_TWO = {"": 56, "small ": 38, "large ": 60}
_COUNTS = {"two": ((33, 95), {"": 54, "small ": 36}), "three": ((24, 64, 104), {"": 38, "small ": 29})}
_ALSO_SIZE = {"small ": ("small ", "tiny ", "little "), "large ": ("large ", "big ", "huge "), "": ("",)}


@dataclass(frozen=True)
class Object:
    """One glyph in a picture: which, where its centre is, and the longer side of its square, in pixels."""

    thing: int
    x: float
    y: float
    size: float


@dataclass(frozen=True)
class Scene:
    """A picture in words and in numbers."""

    caption: str
    objects: tuple[Object, ...]
    background: str = field(default="white")


def draw_scene(things: tuple[Thing, ...], chance: random.Random) -> Scene:
    """One scene by chance: mostly one thing, often two, now and then two or three of a kind."""
    kind = chance.random()
    if kind < 0.52:
        words, objects = _one(things, chance)
    elif kind < 0.88:
        words, objects = _two(things, chance)
    else:
        words, objects = _several(things, chance)
    background = "white" if chance.random() < 0.55 else chance.choice(list(BACKGROUNDS))
    if background != "white" or chance.random() < 0.15:
        words += _on(background, chance)
    if chance.random() < 0.08:
        words = chance.choice(_PREFIXES) + words
    if chance.random() < 0.10:
        words += chance.choice(_ENDS)
    return Scene(words, objects, background)


def single(things: tuple[Thing, ...], index: int, background: str = "white") -> Scene:
    """The scene of an evaluation: `a rocket`, `a rocket on a dark blue background`."""
    words = _with_article(things[index].name)
    if background != "white":
        words += f" on a{'n' if background[0] in 'aeiou' else ''} {background} background"
    return Scene(words, (Object(index, _CENTRE, _CENTRE, _SIZES[""]),), background)


def pair(things: tuple[Thing, ...], left: int, right: int) -> Scene:
    """The scene of an evaluation with two things: `a cat and a pizza`, the first one on the left."""
    words = f"{_with_article(things[left].name)} and {_with_article(things[right].name)}"
    size = _SIZES_OF_TWO[""]
    return Scene(words, (Object(left, 33, _CENTRE, size), Object(right, 95, _CENTRE, size)))


def _one(things: tuple[Thing, ...], chance: random.Random) -> tuple[str, tuple[Object, ...]]:
    index = chance.randrange(len(things))
    size_word = chance.choice(list(_SIZES)) if chance.random() < 0.35 else ""
    words = _phrase(things[index], size_word, chance)
    x, size = _CENTRE, float(_SIZES[size_word])
    if size_word != "large " and chance.random() < 0.12:
        side, x = chance.choice([("left", 34.0), ("right", 94.0)])
        size = min(size, 60.0)
        words += f" on the {side}"
    return words, (jitter(Object(index, x, _CENTRE, size), chance),)


def _two(things: tuple[Thing, ...], chance: random.Random) -> tuple[str, tuple[Object, ...]]:
    first, second = chance.randrange(len(things)), chance.randrange(len(things))
    sizes = [chance.choice(list(_SIZES_OF_TWO)) if chance.random() < 0.2 else "" for _ in range(2)]
    one, other = (_phrase(things[i], size, chance) for i, size in ((first, sizes[0]), (second, sizes[1])))
    words, swapped = chance.choices(
        [
            (f"{one} and {other}", False),
            (f"{one} & {other}", False),
            (f"{one}, {other}", False),
            (f"{one} with {other}", False),
            (f"{one} beside {other}", False),
            (f"{one} on the left and {other} on the right", False),
            (f"{one} on the right and {other} on the left", True),
            (f"{one} next to {other}", False),
            (f"{one} to the left of {other}", False),
            (f"{one} to the right of {other}", True),
        ],
        weights=[12, 1, 1, 1, 1, 4, 2, 2, 2, 2],
    )[0]
    places = (95.0, 33.0) if swapped else (33.0, 95.0)
    objects = (
        Object(index, x, _CENTRE, _SIZES_OF_TWO[size])
        for index, x, size in zip((first, second), places, sizes, strict=True)
    )
    return words, tuple(jitter(one, chance) for one in objects)


def _several(things: tuple[Thing, ...], chance: random.Random) -> tuple[str, tuple[Object, ...]]:
    index = chance.randrange(len(things))
    number = chance.choice(list(_COUNTS))
    places, sizes = _COUNTS[number]
    size_word = chance.choice(list(sizes))
    said = chance.choice(("", "some ", "several ", "a few ")) if chance.random() < 0.2 else f"{number} "
    words = f"{said}{chance.choice(_ALSO_SIZE[size_word])}{make_plural(_described(things[index], chance))}"
    return words, tuple(jitter(Object(index, x, _CENTRE, sizes[size_word]), chance) for x in places)


def _name(thing: Thing, chance: random.Random) -> str:
    return thing.name if chance.random() < 0.6 else chance.choice(thing.names)


def _described(thing: Thing, chance: random.Random) -> str:
    """Its name, now and then with what everybody sees anyway (`red rose`), or with praise."""
    name = _name(thing, chance)
    if thing.colour and thing.colour not in name.split() and chance.random() < 0.08:
        return f"{thing.colour} {name}"
    return chance.choice(_PRAISE) + name if chance.random() < 0.03 else name


def _phrase(thing: Thing, size_word: str, chance: random.Random) -> str:
    if chance.random() < 0.025:
        return thing.glyph
    name = chance.choice(_ALSO_SIZE[size_word]) + _described(thing, chance)
    kind = chance.random()
    if kind < 0.75:
        return _with_article(name)
    return name if kind < 0.93 else f"the {name}"


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _on(background: str, chance: random.Random) -> str:
    word = _OTHER_WORDS.get(background, background) if chance.random() < 0.3 else background
    if chance.random() < 0.25:
        return f" on {word}"
    return f" on a{'n' if word[0] in 'aeiou' else ''} {word} background"


def jitter(one: Object, chance: random.Random) -> Object:
    """A little off: centres by two pixels, sizes by a thirtieth."""
    size = one.size * chance.uniform(0.97, 1.03)
    return Object(one.thing, one.x + chance.uniform(-2, 2), one.y + chance.uniform(-2, 2), size)
