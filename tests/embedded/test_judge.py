"""The judge: it names the glyphs it knows, and says so where there is nothing."""

import random

import numpy as np
import pytest
from PIL import Image

from anyaccel.embedded.judge import BACKGROUNDS, Judge, open_judge


@pytest.fixture(scope="module")
def judge() -> Judge:
    return open_judge()


def paste(judge: Judge, places: list[tuple[int, int, int, int]], background: str = "white") -> Image.Image:
    """Glyphs by number, centre and size, on a background."""
    canvas = Image.new("RGB", (128, 128), BACKGROUNDS[background])
    for index, x, y, size in places:
        glyph = Image.fromarray((judge.glyphs[index] * 255).round().astype(np.uint8)).resize((size, size))
        canvas.paste(glyph, (x - size // 2, y - size // 2), glyph)
    return canvas


def test_it_names_nearly_everything_that_is_drawn(judge: Judge) -> None:
    chance = random.Random(5)
    chosen = chance.sample(range(len(judge.names)), 80)
    right = 0
    for index in chosen:
        where = (index, 64 + chance.randint(-5, 5), 64 + chance.randint(-5, 5), chance.randint(70, 100))
        right += judge.look(paste(judge, [where])).groups[0] == judge.groups[index]
    assert right >= 78


@pytest.mark.parametrize("background", BACKGROUNDS)
def test_it_names_every_background(judge: Judge, background: str) -> None:
    assert judge.background(paste(judge, [(100, 64, 64, 88)], background)) == background


def test_it_tells_left_from_right(judge: Judge) -> None:
    cat, pizza = judge.names.index("cat"), judge.names.index("pizza")
    picture = paste(judge, [(cat, 33, 64, 54), (pizza, 95, 64, 54)])
    assert judge.look(picture, "left").names[0] == "cat"
    assert judge.look(picture, "right").names[0] == "pizza"


def test_a_spoilt_thing_is_not_taken_for_itself(judge: Judge) -> None:
    apple = judge.names.index("red apple")
    picture = np.asarray(paste(judge, [(apple, 64, 64, 88)])).copy()
    picture[:, 64:] = 255
    picture[64:] = 255
    whole = judge.look(paste(judge, [(apple, 64, 64, 88)]))
    assert whole.names[0] == "red apple"
    spoilt = judge.look(Image.fromarray(picture))
    assert spoilt.names[0] != "red apple"
    assert spoilt.distance > 2 * whole.distance


def test_where_there_is_nothing_it_sees_nothing(judge: Judge) -> None:
    assert judge.look(Image.new("RGB", (128, 128), "white")).names == ()


def test_every_name_is_one_thing(judge: Judge) -> None:
    assert len(judge.names) == len(set(judge.names)) == len(judge.glyphs) > 1000
    assert judge.group_of("cat") != judge.group_of("dog")
