"""Errors of pipeline calls that the arguments explain."""

import re
from collections.abc import Iterator

import pytest

from anyaccel import generate
from anyaccel.errors import UsageError
from anyaccel.generation.model_loading import release_model
from tests.conftest import NEEDS_RECIPES
from tests.generation.adapter_files import save_controlnet
from tests.generation.models import CPU, make_image, save_model

pytestmark = NEEDS_RECIPES


@pytest.fixture(autouse=True)
def release() -> Iterator[None]:
    yield
    release_model()


def test_strength_that_leaves_no_step() -> None:
    model = save_model("stable-diffusion-xl-refiner")
    call = {**CPU, "image": make_image()}
    with pytest.raises(UsageError, match=re.escape("a strength of 0.3 leaves none of 2 steps")) as caught:
        generate("a red fox", model, strength=0.3, **call)
    assert caught.value.hint == "use at least 4 steps, or a higher strength"
    assert len(generate("a red fox", model, strength=0.3, **{**call, "num_inference_steps": 4}).images) == 1


def test_input_images_of_different_sizes(tmp_path_factory: pytest.TempPathFactory) -> None:
    controlnet = save_controlnet(tmp_path_factory.mktemp("controlnet"))
    call = {**CPU, "image": make_image(size=64), "control_image": make_image(), "strength": 1.0}
    expected = "the sizes of the input images differ (image 64x64, control_image 16x16)"
    with pytest.raises(UsageError, match=re.escape(expected)) as caught:
        generate("a red fox", save_model("stable-diffusion"), controlnet=controlnet, **call)
    assert "--size" in str(caught.value.hint)
    resized = generate("a red fox", save_model("stable-diffusion"), controlnet=controlnet, height=16, width=16, **call)
    assert resized.images[0].size == (16, 16)
