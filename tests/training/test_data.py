"""The data that the embedded model is trained on: names, captions, scenes."""

import random
from collections import Counter

import numpy as np
import pytest
import torch

from anyaccel.embedded.judge import BACKGROUNDS, load_judge
from anyaccel.embedded.model import find_embedded_model
from training.captions import draw_scene, pair, single
from training.evaluate import evaluate, judge_scenes
from training.glyphs import draw_glyph, name_colour
from training.prepare import load_things, render
from training.scenes import Composer, as_batch
from training.things import list_things, make_plural

THINGS = load_things()


@pytest.fixture(scope="module")
def composer() -> Composer:
    """With the judge's own small glyphs, so that no font is needed."""
    small = (load_judge().glyphs * 255).round().astype(np.uint8)
    return Composer(np.pad(small.repeat(2, 1).repeat(2, 2), ((0, 0), (16, 16), (16, 16), (0, 0))), torch.device("cpu"))


@pytest.fixture(scope="module")
def tokenizer() -> object:
    from transformers import CLIPTokenizer

    return CLIPTokenizer.from_pretrained(find_embedded_model() / "tokenizer")


def test_a_name_belongs_to_one_thing() -> None:
    counted = Counter(name for thing in THINGS for name in thing.names)
    assert [name for name, times in counted.items() if times > 1] == []


@pytest.mark.parametrize(
    ("one", "many"),
    [
        ("cat", "cats"),
        ("berry", "berries"),
        ("watch", "watches"),
        ("goose", "geese"),
        ("glasses", "glasses"),
        ("bottle with popping cork", "bottles with popping cork"),
        ("person juggling", "people juggling"),
    ],
)
def test_plurals(one: str, many: str) -> None:
    assert make_plural(one) == many


def test_captions_say_what_is_drawn() -> None:
    chance = random.Random(3)
    scenes = [draw_scene(THINGS, chance) for _ in range(2000)]
    assert {len(scene.objects) for scene in scenes} == {1, 2, 3}
    assert {scene.background for scene in scenes} == set(BACKGROUNDS)
    for scene in scenes:
        if scene.background != "white":
            assert scene.background.replace("grey", "gray") in scene.caption.replace("grey", "gray")
        if " on the left and " in scene.caption:
            first, second = scene.objects
            assert first.x < second.x
        if " on the right and " in scene.caption:
            first, second = scene.objects
            assert first.x > second.x


def test_no_caption_is_cut(tokenizer: object) -> None:
    chance = random.Random(4)
    captions = [draw_scene(THINGS, chance).caption for _ in range(2000)]
    lengths = [len(row) for row in tokenizer(captions).input_ids]  # type: ignore[operator]
    assert np.mean([length > 32 for length in lengths]) < 0.002


def test_what_is_composed_is_what_the_judge_sees(composer: Composer, tokenizer: object) -> None:
    judge = load_judge()
    scenes = [single(THINGS, index, "light blue") for index in range(0, 1000, 125)]
    for scene, picture in zip(scenes, render(scenes, composer, tokenizer), strict=True):
        assert judge.background(picture) == "light blue"
        assert judge.classify(picture).groups[0] == judge.groups[scene.objects[0].thing]
    (picture,) = render([pair(THINGS, 40, 700)], composer, tokenizer)
    sides = [judge.classify(picture, side).groups[0] for side in ("left", "right")]
    assert sides == [judge.groups[40], judge.groups[700]]


def test_a_batch_keeps_the_places(tokenizer: object) -> None:
    batch = as_batch([pair(THINGS, 3, 5), single(THINGS, 9)], tokenizer)
    assert batch.things.tolist() == [[3, 5, -1], [9, -1, -1]]
    assert batch.places[0, 0].tolist() == [33.0, 64.0, 56.0]
    assert batch.tokens.shape == (2, 32)


def test_the_evaluation_counts_what_the_judge_says(composer: Composer, tokenizer: object) -> None:
    """A perfect painter, and one that paints the same thing always."""
    scenes = {scene.caption: scene for kind in judge_scenes(THINGS, 12).values() for scene in kind}

    def perfect(prompts: list[str], seeds: list[int]) -> list[object]:
        return list(render([scenes[prompt] for prompt in prompts], composer, tokenizer))

    def stubborn(prompts: list[str], seeds: list[int]) -> list[object]:
        return list(render([single(THINGS, 0)] * len(prompts), composer, tokenizer))

    figures, missed = evaluate(THINGS, perfect, 12, seeds=(0,))  # type: ignore[arg-type]
    assert (figures.single, figures.background, figures.pair) == (1.0, 1.0, 1.0)
    assert missed == []
    figures, missed = evaluate(THINGS, stubborn, 12, seeds=(0,))  # type: ignore[arg-type]
    assert figures.single <= 1 / 12
    assert figures.pair == 0
    assert len(missed) >= 11


@pytest.mark.needs_tool("font")
def test_the_list_of_things_can_be_made_again() -> None:
    listed = list_things(lambda glyph: draw_glyph(glyph) is not None)
    assert [(thing.glyph, thing.names) for thing in listed] == [(thing.glyph, thing.names) for thing in THINGS]


@pytest.mark.needs_tool("font")
def test_colours_are_those_of_the_glyphs() -> None:
    colours = {thing.name: name_colour(glyph) for thing in THINGS if (glyph := draw_glyph(thing.glyph)) is not None}
    assert colours["rose"] == "red"
    assert colours["cucumber"] == "green"
    assert colours["elephant"] == "grey"
    kept = {thing.name: thing.colour for thing in THINGS}
    assert kept["rose"] == "red"
    assert kept["cherry blossom"] in (None, "pink")
    taken = {name for thing in THINGS for name in thing.names}
    assert all(
        f"{thing.colour} {name}" not in taken or f"{thing.colour} {name}" in thing.names
        for thing in THINGS
        for name in thing.names
    )
