"""Training data: names, captions and scenes."""

import random
from collections import Counter

import numpy as np
import pytest
import torch

from anyaccel.embedded.judge import BACKGROUNDS, load_judge
from anyaccel.embedded.model import find_embedded_model
from training.captions import Object, Scene, draw_scene, pair, single
from training.color_judge import find_color
from training.colors import COLORS
from training.evaluate import evaluate, judge_scenes
from training.glyphs import draw_glyph, name_color
from training.prepare import load_things, render
from training.scenes import Composer, as_batch
from training.things import list_things, make_plural

THINGS = load_things()


@pytest.fixture(scope="module")
def composer() -> Composer:
    """Return a composer with the judge's small glyphs, which needs no font."""
    small = (load_judge().glyphs * 255).round().astype(np.uint8)
    return Composer(np.pad(small.repeat(2, 1).repeat(2, 2), ((0, 0), (16, 16), (16, 16), (0, 0))), torch.device("cpu"))


@pytest.fixture(scope="module")
def tokenizer() -> object:
    from transformers import CLIPTokenizer

    return CLIPTokenizer.from_pretrained(find_embedded_model() / "tokenizer")


def test_a_name_belongs_to_one_thing() -> None:
    counts = Counter(name for thing in THINGS for name in thing.names)
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize(
    ("singular", "plural"),
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
def test_plurals(singular: str, plural: str) -> None:
    assert make_plural(singular) == plural


def test_captions_match_the_layout() -> None:
    rng = random.Random(3)
    scenes = [draw_scene(THINGS, rng) for _ in range(2000)]
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


def test_captions_name_the_colors_of_recolored_things() -> None:
    rng = random.Random(5)
    scenes = [draw_scene(THINGS, rng) for _ in range(3000)]
    recolored = [scene for scene in scenes if any(item.color for item in scene.objects)]
    assert 0.09 < len(recolored) / len(scenes) < 0.16
    assert {item.color for scene in recolored for item in scene.objects} >= set(COLORS)
    for scene in recolored:
        for color in {item.color for item in scene.objects if item.color}:
            assert color.replace("grey", "gray") in scene.caption.replace("grey", "gray")
            assert color == "white" or color not in scene.background.split()
    names = {name for thing in THINGS for name in thing.names}
    apple = next(thing for thing in THINGS if thing.name == "red apple")
    assert "apple" in apple.recolors["blue"]
    assert "apple" not in apple.recolors.get("green", ())  # `green apple` is another thing
    assert not {f"{color} {name}" for thing in THINGS for color, of in thing.recolors.items() for name in of} & names


def test_three_things_are_in_a_triangle_and_captions_name_motions() -> None:
    rng = random.Random(6)
    scenes = [draw_scene(THINGS, rng) for _ in range(2000)]
    three = [scene.objects for scene in scenes if len(scene.objects) == 3]
    assert 0.07 < len(three) / len(scenes) < 0.13
    for top, left, right in three:
        assert top.y < min(left.y, right.y) - 40
        assert left.x < top.x < right.x
    moving = [scene for scene in scenes if scene.caption.endswith(("bouncing", "spinning", "flying to the left"))]
    assert moving
    assert {len(scene.objects) for scene in moving} == {1}


def test_the_judge_tells_colors_apart(composer: Composer, tokenizer: object) -> None:
    index = next(index for index, thing in enumerate(THINGS) if thing.name == "cat")
    colors = [None, *COLORS]
    scenes = [Scene("", (Object(index, 65, 63, 88, color),), "white") for color in colors]
    images = render(scenes, composer, tokenizer)
    assert [find_color(image, index) for image in images] == ["natural", *COLORS]


def test_captions_are_not_truncated(tokenizer: object) -> None:
    rng = random.Random(4)
    captions = [draw_scene(THINGS, rng).caption for _ in range(2000)]
    lengths = [len(row) for row in tokenizer(captions).input_ids]  # type: ignore[operator]
    assert np.mean([length > 32 for length in lengths]) < 0.002


def test_the_judge_recognizes_composed_images(composer: Composer, tokenizer: object) -> None:
    judge = load_judge()
    scenes = [single(THINGS, index, "light blue") for index in range(0, 1000, 125)]
    for scene, image in zip(scenes, render(scenes, composer, tokenizer), strict=True):
        assert judge.background(image) == "light blue"
        assert judge.classify(image).groups[0] == judge.groups[scene.objects[0].thing]
    (image,) = render([pair(THINGS, 40, 700)], composer, tokenizer)
    sides = [judge.classify(image, side).groups[0] for side in ("left", "right")]
    assert sides == [judge.groups[40], judge.groups[700]]


def test_a_batch_has_the_boxes_of_its_scenes(tokenizer: object) -> None:
    batch = as_batch([pair(THINGS, 3, 5), single(THINGS, 9)], tokenizer)
    assert batch.things.tolist() == [[3, 5, -1], [9, -1, -1]]
    assert batch.boxes[0, 0].tolist() == [33.0, 64.0, 56.0]
    assert batch.tokens.shape == (2, 32)


def test_the_evaluation_counts_the_answers_of_the_judge(composer: Composer, tokenizer: object) -> None:
    """Evaluate a perfect model, and one that always draws the same thing."""
    scenes = {scene.caption: scene for scenes in judge_scenes(THINGS, 12).values() for scene in scenes}

    def perfect(prompts: list[str], seeds: list[int]) -> list[object]:
        return list(render([scenes[prompt] for prompt in prompts], composer, tokenizer))

    def constant(prompts: list[str], seeds: list[int]) -> list[object]:
        return list(render([single(THINGS, 0)] * len(prompts), composer, tokenizer))

    figures, missed = evaluate(THINGS, perfect, 12, seeds=(0,))  # type: ignore[arg-type]
    assert {figures[kind] for kind in ("single", "background", "pair", "color", "three", "motion")} == {1.0}
    assert figures["color_thing"] == 1.0
    assert missed == []
    figures, missed = evaluate(THINGS, constant, 12, seeds=(0,))  # type: ignore[arg-type]
    assert figures["single"] <= 1 / 12
    assert figures["pair"] == figures["three"] == figures["color_thing"] == 0
    assert len(missed) >= 11


@pytest.mark.needs_tool("font")
def test_the_list_of_things_is_reproducible() -> None:
    listed = list_things(lambda glyph: draw_glyph(glyph) is not None)
    assert [(thing.glyph, thing.names) for thing in listed] == [(thing.glyph, thing.names) for thing in THINGS]


@pytest.mark.needs_tool("font")
def test_colors_match_the_glyphs() -> None:
    expected = {"rose": "red", "cucumber": "green", "elephant": "grey"}
    chosen = [thing for thing in THINGS if thing.name in expected]
    colors = {thing.name: name_color(glyph) for thing in chosen if (glyph := draw_glyph(thing.glyph)) is not None}
    assert colors == expected
    stored = {thing.name: thing.color for thing in THINGS}
    assert stored["rose"] == "red"
    assert stored["cherry blossom"] in (None, "pink")
    taken = {name for thing in THINGS for name in thing.names}
    assert all(
        f"{thing.color} {name}" not in taken or f"{thing.color} {name}" in thing.names
        for thing in THINGS
        for name in thing.names
    )
