"""Benchmarks of the folder of a modular pipeline: stock diffusers and anyaccel generate the same image."""

from pathlib import Path
from typing import Any

import pytest
import torch

from anyaccel.bench.case import BenchCase
from anyaccel.bench.pipelines import make_call, make_pipeline
from anyaccel.recipes import recipes
from tests.conftest import NEEDS_RECIPES

pytestmark = [NEEDS_RECIPES, pytest.mark.filterwarnings("ignore::FutureWarning")]


def test_variants_generate_the_same_image(tmp_path: Path) -> None:
    saved: Any = recipes()["stable-diffusion-xl-modular"].make()
    saved.save_pretrained(str(tmp_path), overwrite_modular_index=True)
    call = {"num_inference_steps": 2, "height": 16, "width": 16}
    case = BenchCase(model=str(tmp_path), title="tiny", device="cpu", dtype="float32", call=call)
    images = []
    for variant in ("stock eager", "anyaccel"):
        pipe = make_pipeline(case, variant)
        images.append(pipe(**make_call(case, pipe), generator=torch.Generator("cpu").manual_seed(0)))
    assert isinstance(images[0], torch.Tensor)
    assert torch.equal(*images)
