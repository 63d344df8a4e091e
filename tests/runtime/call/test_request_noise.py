"""Noise of requests that are split into several pipeline calls, compared with stock diffusers."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import diffusers
import numpy
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from PIL.Image import Image

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.errors import UsageError
from anyaccel.recipes import recipes
from anyaccel.runtime.call.batch_draws import CannotSplitError, NothingToSplitError, TracedDraws, match_draws
from anyaccel.runtime.workarounds.noise import ChunkDraw, make_generators
from anyaccel.tracing.draw_trace import DrawRecord
from tests.conftest import NEEDS_RECIPES
from tests.runtime.workarounds.test_noise import cpu_generator, generate
from tests.runtime.workarounds.test_scheduler_tensors_on_cpu import IMAGE_TO_IMAGE, INPAINT, make_pipe


def traced(images: int, *draws: tuple[str, tuple[int, ...], int | None], generators: int = 0) -> TracedDraws:
    return TracedDraws(tuple(DrawRecord(*draw) for draw in draws), images, images, generators)


def test_draws_are_shared_or_have_a_row_per_image() -> None:
    batch = traced(3, ("randn", (1, 4), 0), ("randn", (3, 4), 0), ("rand", (3, 2), None), ("multinomial", (48, 1), 0))
    part = traced(1, ("randn", (1, 4), 0), ("randn", (1, 4), 0), ("rand", (1, 2), None), ("multinomial", (16, 1), 0))
    assert match_draws(batch, part, 2) == [
        ChunkDraw("randn", (1, 4), (1, 4)),
        ChunkDraw("randn", (1, 4), (3, 4), first_row=2),
        ChunkDraw("rand", (1, 2), (3, 2), first_row=2),
        ChunkDraw("multinomial", (16, 1), (48, 1), first_row=32),
    ]


def test_draws_from_a_list_of_generators() -> None:
    """The first generator also draws for a shared input image."""
    batch = traced(2, ("randn", (1, 4), 0), ("randn", (1, 4), 0), ("randn", (1, 4), 1), generators=2)
    part = traced(1, ("randn", (1, 4), 0), ("randn", (1, 4), 0))
    assert match_draws(batch, part, 1) == [
        ChunkDraw("randn", (1, 4), (1, 4), by_first_image=True),
        ChunkDraw("randn", (1, 4), (1, 4), advances_first_image=True),
    ]


@pytest.mark.parametrize(
    ("batch", "part"),
    [
        ((("randn", (4, 4), 0),), (("randn", (2, 4), 0),)),  # two rows per image, in an unknown order
        ((("randn", (4, 2), 0),), (("randn", (4, 1), 0),)),  # the batch is not the first dimension
        ((("randn", (3, 4), 0),), (("randn", (1, 4), 0),)),
        ((("randn", (2, 4), 0),), (("rand", (1, 4), 0),)),
        ((("randn", (2, 4), 0),), (("randn", (1, 4), None),)),
        ((("randn", (1, 4), 0), ("randn", (1, 4), 0)), (("randn", (1, 4), 0),)),
        ((("randperm", (2,), 0),), (("randperm", (1,), 0),)),
        ((("poisson", (2, 4), 0),), (("poisson", (1, 4), 0),)),
    ],
)
def test_draws_that_cannot_be_attributed_to_images_raise(batch: Any, part: Any) -> None:
    with pytest.raises(CannotSplitError):
        match_draws(traced(2, *batch), traced(1, *part), 0)


def test_pipeline_that_returns_one_result_for_any_number_of_images_is_not_split() -> None:
    whole = TracedDraws((), 1, 2, 0)
    with pytest.raises(NothingToSplitError):
        match_draws(whole, TracedDraws((), 1, 1, 0), 0)
    with pytest.raises(CannotSplitError, match="5 results for 2 images"):
        match_draws(TracedDraws((), 5, 2, 0), TracedDraws((), 1, 1, 0), 0)


def as_array(result: Any) -> Any:
    return torch.as_tensor(result[0]).float()


def call_stock_and_split(name: str, generators: Callable[[], Any], **arguments: Any) -> None:
    """Check that a split batch has the images of stock diffusers and leaves generators in the same state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock: Any = recipes()[name].make()
        split = anyaccel.place(copy.deepcopy(stock), "cpu", dtype=torch.float32, images_per_call=1)
        results, states = [], []
        for pipe in (stock, split):
            torch.manual_seed(3)
            generator = generators()
            call = recipes()[name].call() | {"generator": generator, "return_dict": False} | arguments
            results.append(as_array(pipe(**call)))
            passed = generator if isinstance(generator, list) else [generator] if generator else []
            states.append([each.get_state() for each in (*passed, torch.default_generator)])
    expected, actual = results
    assert expected.shape == actual.shape
    assert (expected - actual).abs().max() < 1e-4
    for state, other in zip(*states, strict=True):
        assert torch.equal(state, other)


@NEEDS_RECIPES
@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("stable-diffusion", "num_images_per_prompt"),
        (IMAGE_TO_IMAGE, "num_images_per_prompt"),
        (INPAINT, "num_images_per_prompt"),
        ("amused", "num_images_per_prompt"),
        ("amused-image-to-image", "num_images_per_prompt"),
        ("wan", "num_videos_per_prompt"),
        ("ltx-image-to-video", "num_videos_per_prompt"),
        ("cogview-4-control", "num_images_per_prompt"),  # encodes its input image without a generator
        ("cogvideo", "num_videos_per_prompt"),  # ignores the number of videos
    ],
)
def test_one_generator_for_a_split_batch(name: str, argument: str) -> None:
    call_stock_and_split(name, lambda: cpu_generator(5), **{argument: 2})


@NEEDS_RECIPES
def test_default_generator_and_list_of_generators_for_a_split_batch() -> None:
    call_stock_and_split(INPAINT, lambda: None, num_images_per_prompt=2)
    # diffusers encodes the shared input image with the first generator of the list.
    call_stock_and_split(INPAINT, lambda: make_generators((5, 6)), num_images_per_prompt=2)
    call_stock_and_split(IMAGE_TO_IMAGE, lambda: make_generators((5, 6)), num_images_per_prompt=2)


@NEEDS_RECIPES
def test_split_batch_on_a_device_with_unreliable_batches() -> None:
    def use(accelerator: VirtualAccelerator) -> float:
        warnings.simplefilter("ignore")
        plain = make_pipe(INPAINT)
        placed = anyaccel.place(copy.deepcopy(plain), accelerator.name, dtype=torch.float32)
        expected = generate(INPAINT, plain, 3, generator=cpu_generator(5), strength=0.9)
        actual = generate(INPAINT, placed, 3, generator=cpu_generator(5), strength=0.9)
        return float((actual - expected).abs().max())

    assert run_forked("mps", use) < 1e-4


@NEEDS_RECIPES
def test_noise_that_cannot_be_attributed_to_an_image_raises() -> None:
    """Stable Diffusion 3 encodes a control image for both halves of guidance: the order of the rows is unknown."""
    name = "stable-diffusion-3-controlnet"
    pipe = anyaccel.place(recipes()[name].make(), "cpu", dtype=torch.float32, images_per_call=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UsageError, match="unknown which values belong to which image") as caught:
            pipe(**recipes()[name].call() | {"num_images_per_prompt": 2})
    assert "seed=[1, 2]" in caught.value.hint


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
def test_split_batch_of_every_recipe(name: str) -> None:
    """A split batch has stock diffusers' images, or raises; skipped if diffusers cannot generate two images."""
    warnings.simplefilter("ignore")
    stock: Any = recipes()[name].make()
    split = anyaccel.place(recipes()[name].make(), "cpu", dtype=torch.float32, images_per_call=1)
    call, generators = two_images(name, stock), [cpu_generator(5), cpu_generator(5)]
    try:
        expected = flatten(stock(**call, generator=generators[0]))
    except _UNSUPPORTED as error:
        pytest.skip(f"diffusers cannot generate two images: {error}")
    try:
        actual = flatten(split(**call, generator=generators[1]))
    except UsageError as error:
        if "with the same noise as in one call" not in str(error):
            raise
        return
    assert [tensor.shape for tensor in actual] == [tensor.shape for tensor in expected]
    # Tiny models with random weights amplify rounding errors; other noise differs by more than 0.1.
    for one, other in zip(actual, expected, strict=True):
        assert (one - other).abs().max() < 2e-2 * max(1.0, float(other.abs().max()))
    assert torch.equal(generators[0].get_state(), generators[1].get_state())


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


def test_a_batch_with_dependent_images_is_not_split() -> None:
    """On a device that splits batches, code of the user may combine the images of a batch."""

    class Mixing:
        def __call__(self, attn: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            output = AttnProcessor2_0()(attn, hidden_states, **kwargs)
            return output + output.mean(0, keepdim=True)

    class CustomPipeline(diffusers.StableDiffusionPipeline):  # type: ignore[misc]
        pass

    def use(accelerator: VirtualAccelerator) -> None:
        warnings.simplefilter("ignore")
        stock: Any = recipes()["stable-diffusion"].make()
        custom = CustomPipeline(**stock.components, requires_safety_checker=False)
        stock.unet.set_attn_processor(Mixing())
        call = recipes()["stable-diffusion"].call() | {"num_images_per_prompt": 2}
        for pipe, reason in ((stock, "custom attention processors"), (custom, "not a class of diffusers")):
            with pytest.raises(UsageError, match=reason):
                anyaccel.place(pipe, accelerator.name, dtype="float32")(**call)
        placed = anyaccel.place(custom, accelerator.name, dtype="float32", images_per_call=1)
        assert len(placed(**call).images) == 2

    run_forked("mps", use, timeout_s=300)


def test_the_same_generator_twice_is_not_split() -> None:
    pipe = anyaccel.place(recipes()["stable-diffusion"].make(), "cpu", dtype="float32", images_per_call=1)
    generator = torch.Generator().manual_seed(1)
    with pytest.raises(UsageError, match="the same generator twice"):
        pipe(**recipes()["stable-diffusion"].call() | {"num_images_per_prompt": 2, "generator": [generator] * 2})


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("audio-ldm-2", {"prompt": ["a dog", "a very long cat"]}),
        ("lumina-2", {"prompt": ["a", "b"], "num_images_per_prompt": 2}),
    ],
)
def test_images_that_depend_on_the_batch_are_not_split(name: str, arguments: dict[str, Any]) -> None:
    recipe = recipes()[name]
    pipe = anyaccel.place(recipe.make(), "cpu", dtype="float32", images_per_call=1)
    with pytest.raises(UsageError, match="cannot be generated in"):
        pipe(**recipe.call() | {"generator": None, **arguments})
