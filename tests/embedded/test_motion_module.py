"""The trained motion module: a judge recognizes the things and the motions in its videos."""

from pathlib import Path
from typing import Any

import pytest

from anyaccel.embedded import motion
from anyaccel.embedded.motion import FRAMES, LORA_FILE, MOTIONS
from anyaccel.generation.generate import generate
from tests.conftest import NEEDS_RECIPES
from training.motion.judge import judge_video

FOLDER = Path(motion.__file__).parent / "motion"
CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "seed": 7}
MAX_BYTES = 15_000_000
# The first wording of each motion, with things that the judge can tell apart in every frame.
THINGS = ("rocket", "guitar", "cat", "red apple", "fox", "rocket", "guitar", "cat", "rocket", "red apple")
# Most things that spin change their shape (`benchmarks/results/embedded_motion_h200.json`).
CASES = [(kind, thing) for kind, thing in zip(MOTIONS, THINGS, strict=True) if kind != "spin"]


def check_video(kind: str, thing: str) -> None:
    """Generate a video and judge it."""
    prompt = f"a {thing} {MOTIONS[kind][0]}"
    result = generate(prompt, frames=FRAMES, **CPU)
    assert result.metadata[0].model == "embedded-video"
    verdict = judge_video(result.videos[0].frames, thing, kind)
    assert verdict.same_thing, prompt
    assert verdict.moves, prompt


@NEEDS_RECIPES
@pytest.mark.long
def test_a_rocket_flies_to_the_left() -> None:
    check_video("left", "rocket")


@NEEDS_RECIPES
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "thing"), CASES[1:])
def test_motions(kind: str, thing: str) -> None:
    check_video(kind, thing)


def test_the_files_are_small() -> None:
    names = {path.name for path in FOLDER.iterdir()}
    assert {"config.json", "diffusion_pytorch_model.safetensors", LORA_FILE} <= names
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) < MAX_BYTES
