"""A placed pipeline accepts every call that stock diffusers accepts, and returns the same image."""

from __future__ import annotations

import copy
from typing import Any

import numpy
import pytest
import torch

import anyaccel
from anyaccel.errors import UsageError
from anyaccel.recipes import recipes
from tests.conftest import NEEDS_RECIPES

pytestmark = NEEDS_RECIPES


def call(pipe: Any, name: str, **changed: Any) -> numpy.ndarray[Any, Any]:
    arguments = recipes()[name].call() | {"num_inference_steps": 2, "output_type": "np"} | changed
    arguments.setdefault("generator", torch.Generator().manual_seed(0))
    images: numpy.ndarray[Any, Any] = pipe(**arguments).images
    return images


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        pytest.param("flux", {"height": 17, "width": 17}, id="sizes that the pipeline rounds down"),
        pytest.param("kandinsky-2-2", {"height": 17, "width": 17}, id="sizes that the pipeline rounds up"),
        pytest.param("flux", {"height": numpy.int64(16), "width": numpy.int32(16)}, id="NumPy sizes"),
        pytest.param("flux", {"height": 16.0}, id="a size as a float"),
        pytest.param("stable-diffusion", {"height": 0, "width": 0}, id="zero is the default size"),
        pytest.param("flux", {"num_inference_steps": numpy.int64(2)}, id="NumPy steps"),
        pytest.param("flux", {"num_inference_steps": 0, "sigmas": [1.0, 0.5]}, id="a custom schedule"),
        pytest.param("flux", {"num_images_per_prompt": numpy.int64(2)}, id="NumPy number of images"),
    ],
)
def test_calls_that_stock_diffusers_accepts(name: str, changed: dict[str, Any]) -> None:
    plain: Any = recipes()[name].make()
    plain.set_progress_bar_config(disable=True)
    placed = anyaccel.place(copy.deepcopy(plain), "cpu", dtype="float32")
    expected = call(plain, name, **changed)
    image = call(placed, name, **changed)
    assert image.shape == expected.shape
    numpy.testing.assert_allclose(image, expected, atol=1e-4)


def test_a_custom_pipeline_that_forwards_its_arguments() -> None:
    import diffusers

    stock: Any = diffusers.StableDiffusionPipeline

    class CustomPipeline(stock):  # type: ignore[misc]
        def __call__(self, prompt: Any, **kwargs: Any) -> Any:
            return super().__call__(prompt, **kwargs)

    plain: Any = recipes()["stable-diffusion"].make()
    custom: Any = CustomPipeline(**plain.components, requires_safety_checker=False)
    custom.set_progress_bar_config(disable=True)
    placed = anyaccel.place(custom, "cpu", dtype="float32")
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    images = call(placed, "stable-diffusion", num_images_per_prompt=2, generator=generators)
    assert len(images) == 2
    with pytest.raises(UsageError, match="list of generators of length 2"):
        call(placed, "stable-diffusion", num_images_per_prompt=3, generator=generators)
