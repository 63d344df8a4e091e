"""Seeds of several images: each image is the one that its seed gives alone."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import numpy
import pytest
import torch
from diffusers import StableDiffusionPipeline
from diffusers.pipelines.stable_diffusion.pipeline_output import StableDiffusionPipelineOutput
from PIL.Image import Image

import anyaccel
from anyaccel.errors import UsageError
from anyaccel.recipes import recipes
from anyaccel.recipes.parts.calls import make_image
from anyaccel.runtime.call.single_images import join_results, repeat_input_images, select_image
from anyaccel.runtime.call_request import CallRequest, read_call_request
from tests.conftest import NEEDS_RECIPES

IMAGE_ARGUMENTS = frozenset({"prompt", "image", "strength", "num_images_per_prompt"})


def make_request(**arguments: Any) -> CallRequest:
    """Return the request of a Stable Diffusion call."""
    pipe: Any = object.__new__(StableDiffusionPipeline)
    return read_call_request(pipe, StableDiffusionPipeline.__call__, (), arguments)


def test_the_number_of_images_of_a_call() -> None:
    assert make_request(prompt="a").images == 1
    assert make_request(prompt=["a", "b"], num_images_per_prompt=3).images == 6
    assert make_request(prompt_embeds=torch.ones(4, 7, 8)).images == 4
    assert make_request(prompt_embeds=torch.ones(1, 7, 8), num_images_per_prompt=2).images == 2


def test_the_call_for_one_of_several_images() -> None:
    latents = torch.arange(4).view(4, 1)
    request = make_request(
        prompt=["a", "b"], negative_prompt=["c", "d"], num_images_per_prompt=2, seed=[1, 2, 3, 4], latents=latents,
        sigmas=[1.0, 0.5], guidance_scale=3.0, prompt_embeds=torch.tensor([[5.0], [6.0]]), height=16,
    )  # fmt: skip
    single = select_image(request, 3)
    assert (single.images, single.seeds) == (1, (4,))
    arguments = single.arguments
    assert (arguments["prompt"], arguments["negative_prompt"]) == (["b"], ["d"])
    assert arguments["latents"].tolist() == [[3]]
    assert arguments["prompt_embeds"].tolist() == [[6.0]]
    assert arguments["num_images_per_prompt"] == 1
    assert arguments["sigmas"] == [1.0, 0.5]
    assert select_image(make_request(prompt="a", num_images_per_prompt=2, seed=1), 1).arguments["prompt"] == "a"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image", [make_image(8), make_image(8)]),  # references for both prompts, or one per prompt
        ("image", torch.ones(2, 3, 8, 8)),
        ("ip_adapter_image", [make_image(8), make_image(8)]),
        ("cross_attention_kwargs", {"gligen": torch.ones(2)}),
    ],
)
def test_an_argument_that_cannot_be_attributed_to_an_image_raises(name: str, value: Any) -> None:
    accepts = frozenset({"prompt", name})
    request = CallRequest({"prompt": ["a", "b"], name: value}, 2, 1, accepts, (3, 4))
    with pytest.raises(UsageError, match=f"which part of '{name}' belongs to which image") as caught:
        select_image(request, 0)
    assert "separate calls" in caught.value.hint


def test_an_input_image_per_prompt() -> None:
    images = [make_image(8, seed=1), make_image(8, seed=2)]
    request = CallRequest({"prompt": ["a", "b"], "image": images}, 2, 1, IMAGE_ARGUMENTS, (3, 4))
    assert select_image(request, 1).arguments["image"] == [images[1]]


def test_a_shared_input_image_is_repeated_per_seed() -> None:
    def repeat(image: Any, prompts: int, each: int, more: frozenset[str] = frozenset()) -> Any:
        request = CallRequest({"image": image}, prompts, each, IMAGE_ARGUMENTS | more, tuple(range(prompts * each)))
        return repeat_input_images(request).arguments["image"]

    first, second = make_image(8, seed=1), make_image(8, seed=2)
    assert repeat(first, 2, 1) == [first, first]
    assert repeat([first], 2, 1) == [first, first]
    assert repeat([first, second], 2, 2) == [first, first, second, second]
    assert repeat(first, 1, 3) == [first] * 3
    assert repeat(first, 2, 2, frozenset({"image_embeds"})) == [first, first]
    assert repeat(torch.ones(1, 3, 8, 8), 3, 1).shape == (3, 3, 8, 8)
    assert repeat([[first, second]], 2, 1) == [[first, second]]
    text = CallRequest({"prompt": "a"}, 1, 2, frozenset({"prompt"}), (3, 4))
    assert repeat_input_images(text) is text


def test_results_of_every_kind_are_joined() -> None:
    images = [make_image(4, seed=seed) for seed in range(3)]
    outputs = [
        StableDiffusionPipelineOutput(images=[image], nsfw_content_detected=[flag])
        for image, flag in zip(images, (False, True, False), strict=True)
    ]
    joined = join_results(outputs)
    assert type(joined) is StableDiffusionPipelineOutput
    assert joined.images == images
    assert joined.nsfw_content_detected == [False, True, False]
    arrays = [StableDiffusionPipelineOutput(images=numpy.full((1, 2), n), nsfw_content_detected=None) for n in (1, 2)]
    assert join_results(arrays).images.tolist() == [[1, 1], [2, 2]]
    assert join_results(arrays).nsfw_content_detected is None
    tensors = join_results([(torch.tensor([[1.0]]), None), (torch.tensor([[2.0]]), None)])
    assert isinstance(tensors, tuple)
    assert tensors[0].tolist() == [[1.0], [2.0]]
    assert tensors[1] is None
    assert join_results([torch.tensor(1.0), torch.tensor(2.0)]).tolist() == [1.0, 2.0]
    with pytest.raises(UsageError, match="results with a int of several images cannot be joined"):
        join_results([(images[:1], 1), (images[1:2], 1)])


@NEEDS_RECIPES
@pytest.mark.parametrize("name", ["amused", "cogview-4-control", "deep-floyd-inpaint"])
def test_seeds_for_pipelines_that_do_not_draw_per_image(name: str) -> None:
    """They reject a list of generators, encode an image without a generator, and reject a list of input images."""
    pipe = anyaccel.place(recipes()[name].make(), "cpu", dtype=torch.float32)
    call = recipes()[name].call() | {"generator": None, "output_type": "np"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        together = [pipe(**call | {"num_images_per_prompt": 2, "seed": [4, 9]}).images for _ in range(2)]
        single = [pipe(**call, seed=seed).images for seed in (4, 9)]
    for images in together:
        for row in range(2):
            assert abs(images[row] - single[row][0]).max() < 1e-4


@NEEDS_RECIPES
def test_seed_of_a_pipeline_whose_batch_size_is_not_the_number_of_images() -> None:
    pipe = anyaccel.place(recipes()["marigold-depth"].make(), "cpu", dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = pipe(**recipes()["marigold-depth"].call() | {"generator": None, "batch_size": 2, "seed": 7})
    assert result.seeds == (7,)
    assert len(result.prediction) == 1


# All recipes

_COUNTS = ("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt", "num_audios_per_prompt")
# What diffusers raises for two images if a pipeline supports only one.
_UNSUPPORTED = (RuntimeError, ValueError, IndexError, AssertionError, AttributeError, TypeError)


def one_image(name: str) -> dict[str, Any]:
    call: dict[str, Any] = recipes()[name].call() | {"return_dict": False}
    call.pop("generator", None)
    return call | ({"class_labels": [1]} if "class_labels" in call else {})


def two_images(name: str, pipe: Any) -> dict[str, Any]:
    """Return the arguments of a call for two images of the same prompt, without a generator."""
    call = one_image(name)
    accepted = inspect.signature(type(pipe).__call__).parameters
    count = next((argument for argument in _COUNTS if argument in accepted), None)
    if count is not None:
        return call | {count: 2}
    if isinstance(call.get("prompt"), str):
        texts = {argument: value for argument, value in call.items() if "prompt" in argument and isinstance(value, str)}
        return call | {argument: [value, value] for argument, value in texts.items()}
    return call | ({"class_labels": [1, 1]} if "class_labels" in call else {"batch_size": 2})


def flatten(value: Any) -> list[torch.Tensor]:
    """Return the tensors, arrays and images in a nested value."""
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in flatten(item)]
    if isinstance(value, Image):
        value = numpy.array(value)
    return [torch.as_tensor(value).float()] if isinstance(value, torch.Tensor | numpy.ndarray) else []


@NEEDS_RECIPES
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(recipes()))
def test_seeds_of_every_recipe_do_not_depend_on_the_batch(name: str) -> None:
    warnings.simplefilter("ignore")
    pipe = anyaccel.place(recipes()[name].make(), "cpu", dtype=torch.float32)
    try:
        together = pipe(**two_images(name, pipe), seed=[4, 9])
    except (UsageError, *_UNSUPPORTED) as error:
        pytest.skip(f"the pipeline cannot generate two images: {error}")
    single = [flatten(pipe(**one_image(name), seed=seed)[0]) for seed in (4, 9)]
    expected = torch.cat([tensor.flatten() for tensors in single for tensor in tensors])
    actual = torch.cat([tensor.flatten() for tensor in flatten(together[0])])
    assert (actual - expected).abs().max() < 2e-2 * max(1.0, float(expected.abs().max()))
