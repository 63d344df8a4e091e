"""Benchmarks of models for video and audio: stock diffusers and anyaccel generate the same result."""

from pathlib import Path
from typing import Any

import pytest
import torch

from anyaccel.bench.case import BenchCase
from anyaccel.bench.pipelines import make_call, make_pipeline
from anyaccel.errors import UsageError
from anyaccel.recipes import recipes
from tests.conftest import NEEDS_RECIPES

pytestmark = [NEEDS_RECIPES, pytest.mark.filterwarnings("ignore::FutureWarning")]


def save(name: str, folder: Path) -> str:
    pipe: Any = recipes()[name].make()
    pipe.save_pretrained(str(folder))
    return str(folder)


@pytest.mark.parametrize(
    ("recipe", "call", "field"),
    [
        ("wan", {"width": 16, "height": 16, "frames": 5, "max_sequence_length": 32}, "frames"),
        ("stable-audio", {"seconds": 1}, "audios"),
        ("ddpm", {}, "images"),
        # Slow: the input image has the default size.
        pytest.param("stable-diffusion-image-to-image", {}, "images", marks=pytest.mark.slow),
    ],
)
def test_variants_generate_the_same_result(recipe: str, call: dict[str, Any], field: str, tmp_path: Path) -> None:
    call = {"num_inference_steps": 2, **call}
    case = BenchCase(model=save(recipe, tmp_path), device="cpu", dtype="float32", call=call)
    results = []
    for variant in ("stock eager", "anyaccel"):
        pipe = make_pipeline(case, variant)
        output = pipe(**make_call(case, pipe), generator=torch.Generator("cpu").manual_seed(0))
        results.append(torch.as_tensor(getattr(output, field)))
    assert torch.equal(*results)


def test_arguments_are_checked(tmp_path: Path) -> None:
    case = BenchCase(model=save("ddpm", tmp_path), device="cpu", dtype="float32", call={"frames": 5})
    with pytest.raises(UsageError, match="DDPMPipeline has no argument for the number of frames"):
        make_call(case, make_pipeline(case, "stock eager"))
