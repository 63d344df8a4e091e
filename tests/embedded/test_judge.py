"""The judge recognizes the glyphs of the training data and reports empty images."""

import random

import numpy as np
import pytest
from PIL import Image

from anyaccel.embedded.judge import BACKGROUNDS, Judge, load_judge


@pytest.fixture(scope="module")
def judge() -> Judge:
    return load_judge()


def paste(judge: Judge, glyphs: list[tuple[int, int, int, int]], background: str = "white") -> Image.Image:
    """Draw glyphs, given by index, center x, center y and size, on a background."""
    canvas = Image.new("RGB", (128, 128), BACKGROUNDS[background])
    for index, x, y, size in glyphs:
        glyph = Image.fromarray((judge.glyphs[index] * 255).round().astype(np.uint8)).resize((size, size))
        canvas.paste(glyph, (x - size // 2, y - size // 2), glyph)
    return canvas


def test_nearly_all_glyphs_are_recognized(judge: Judge) -> None:
    generator = random.Random(5)
    indices = generator.sample(range(len(judge.names)), 80)
    correct = 0
    for index in indices:
        glyph = (index, 64 + generator.randint(-5, 5), 64 + generator.randint(-5, 5), generator.randint(70, 100))
        correct += judge.classify(paste(judge, [glyph])).groups[0] == judge.groups[index]
    assert correct >= 78


@pytest.mark.parametrize("background", BACKGROUNDS)
def test_every_background_is_recognized(judge: Judge, background: str) -> None:
    assert judge.background(paste(judge, [(100, 64, 64, 88)], background)) == background


def test_left_and_right_halves_are_recognized(judge: Judge) -> None:
    cat, pizza = judge.names.index("cat"), judge.names.index("pizza")
    image = paste(judge, [(cat, 33, 64, 54), (pizza, 95, 64, 54)])
    assert judge.classify(image, "left").names[0] == "cat"
    assert judge.classify(image, "right").names[0] == "pizza"


def test_damaged_object_is_not_recognized(judge: Judge) -> None:
    apple = judge.names.index("red apple")
    pixels = np.asarray(paste(judge, [(apple, 64, 64, 88)])).copy()
    pixels[:, 64:] = 255
    pixels[64:] = 255
    whole = judge.classify(paste(judge, [(apple, 64, 64, 88)]))
    assert whole.names[0] == "red apple"
    damaged = judge.classify(Image.fromarray(pixels))
    assert damaged.names[0] != "red apple"
    assert damaged.distance > 2 * whole.distance


def test_empty_image_has_no_objects(judge: Judge) -> None:
    assert judge.classify(Image.new("RGB", (128, 128), "white")).names == ()


def test_names_are_unique(judge: Judge) -> None:
    assert len(judge.names) == len(set(judge.names)) == len(judge.glyphs) > 1000
    groups = dict(zip(judge.names, judge.groups, strict=True))
    assert groups["cat"] != groups["dog"]
