"""The embedded model: its size, loading with plain diffusers, and whether its images match the prompts."""

import json
import random
from pathlib import Path
from typing import Any

import diffusers as plain
import pytest
import torch
from PIL import Image
from safetensors import safe_open

import anyaccel
from anyaccel.embedded.judge import load_judge
from anyaccel.embedded.model import CALL_DEFAULTS, find_embedded_model
from anyaccel.embedded.vocabulary import find_unknown_words
from training.captions import draw_scene
from training.prepare import load_things

diffusers: Any = plain  # diffusers has no complete type annotations
FOLDER = find_embedded_model()
MAX_BYTES = 40_000_000


@pytest.fixture(scope="module")
def pipe() -> Any:
    """The model, loaded with plain diffusers and without anyaccel."""
    loaded = diffusers.DiffusionPipeline.from_pretrained(FOLDER)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def draw(pipe: Any, prompts: list[str]) -> list[Image.Image]:
    generators = [torch.Generator().manual_seed(7) for _ in prompts]
    images: list[Image.Image] = pipe(prompts, generator=generators, **CALL_DEFAULTS).images
    return images


def test_model_is_small_and_in_half_precision() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES
    weights = [path for path in files if path.suffix == ".safetensors"]
    assert len(weights) == 3
    for path in weights:
        with safe_open(path, "pt") as tensors:
            assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} <= {"F16", "I64"}  # noqa: SIM118


def test_configs_contain_no_local_paths() -> None:
    for path in FOLDER.rglob("*.json"):
        assert "_name_or_path" not in json.loads(path.read_text())


def test_plain_diffusers_draws_the_prompt(pipe: Any) -> None:
    assert type(pipe) is diffusers.StableDiffusionPipeline
    judge = load_judge()
    apple, rocket, both = draw(pipe, ["a red apple", "a rocket on a dark blue background", "a cat and a pizza"])
    assert apple.size == (128, 128)
    assert judge.classify(apple).names[0] == "red apple"
    assert judge.background(apple) == "white"
    assert judge.classify(rocket).names[0] == "rocket"
    assert judge.background(rocket) == "dark blue"
    assert [judge.classify(both, side).names[0] for side in ("left", "right")] == ["cat", "pizza"]


def test_unknown_prompts_still_give_an_image(pipe: Any) -> None:
    images = draw(pipe, ["", "Ünïcødé 漢字 🍎 99!"])
    assert [image.size for image in images] == [(128, 128)] * 2


def test_tokenizer_survives_saving(pipe: Any, tmp_path: Path) -> None:
    pipe.save_pretrained(tmp_path)
    reloaded = anyaccel.DiffusionPipeline.from_pretrained(tmp_path)
    text = "three small stars on a light green background"
    assert reloaded.tokenizer(text).input_ids == pipe.tokenizer(text).input_ids
    assert pipe.tokenizer.unk_token_id not in pipe.tokenizer(text).input_ids[1:-1]


@pytest.mark.parametrize(
    ("prompt", "unknown"),
    [
        ("three small stars on a black background.", []),
        ("a video of a rocket that is flying upwards", []),
        ("a rocket vanishing", []),
        ("Please draw me a fox & two teddy bears!", []),
        ("un gato azul", ["un", "gato", "azul"]),
        ("a cat in the style of Monet", ["style", "monet"]),
        ("", []),
    ],
)
def test_unknown_words_are_found(prompt: str, unknown: list[str]) -> None:
    assert find_unknown_words(prompt) == unknown


def test_captions_contain_only_known_words() -> None:
    generator, things = random.Random(3), load_things()
    captions = [draw_scene(things, generator).caption for _ in range(2000)]
    unknown = {word for caption in captions for word in find_unknown_words(caption)}
    assert unknown == set()
