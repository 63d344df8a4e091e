"""Split batches: on some devices each image is its own call; order, progress bar and result are those of one call."""

from __future__ import annotations

import contextlib
import copy
import io
import re
import warnings
from typing import Any

import numpy
import pytest
import torch
from diffusers import StableDiffusionPipeline
from diffusers.pipelines.stable_diffusion.pipeline_output import StableDiffusionPipelineOutput

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.recipes import recipes
from anyaccel.recipes.parts.calls import make_image
from anyaccel.runtime.batch_split import SharedProgress, join_results, split_request
from anyaccel.runtime.call_request import CallRequest, read_call_request
from tests.conftest import NEEDS_RECIPES
from tests.runtime.workarounds.test_scheduler_tensors_on_cpu import (
    IMAGE_TO_IMAGE,
    TEXT_TO_IMAGE,
    make_pipe,
    make_scheduler,
)

PROMPTS = ["a red fox", "a hen", "two blue boats"]


def make_generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def make_request(**arguments: Any) -> CallRequest:
    """Return the request of a Stable Diffusion call."""
    pipe: Any = object.__new__(StableDiffusionPipeline)
    return read_call_request(pipe, StableDiffusionPipeline.__call__, (), arguments)


def split_argument(request: CallRequest, name: str, images_per_call: int = 1) -> list[Any]:
    return [chunk.arguments.get(name) for chunk in split_request(request, images_per_call)]


# Arguments


def test_the_number_of_images_of_a_call() -> None:
    assert make_request(prompt="a").images == 1
    assert make_request(prompt=["a", "b"], num_images_per_prompt=3).images == 6
    assert make_request(prompt_embeds=torch.ones(4, 7, 8)).images == 4
    assert make_request(prompt_embeds=torch.ones(1, 7, 8), num_images_per_prompt=2).images == 2


def test_a_call_within_the_limit_is_not_split() -> None:
    request = make_request(prompt=["a", "b"])
    assert split_request(request, None) == [request]
    assert split_request(request, 2) == [request]


def test_prompts_embeddings_and_generators_are_split_per_image() -> None:
    embeds = torch.arange(6.0).reshape(3, 2, 1)
    request = make_request(
        prompt=PROMPTS,
        negative_prompt=["x", "y", "z"],
        prompt_embeds=embeds,
        generator=[make_generator(s) for s in (1, 2, 3)],
    )
    assert split_argument(request, "prompt") == [["a red fox"], ["a hen"], ["two blue boats"]]
    assert split_argument(request, "negative_prompt") == [["x"], ["y"], ["z"]]
    assert [embed.tolist() for embed in split_argument(request, "prompt_embeds")] == [[row] for row in embeds.tolist()]
    assert [generator.initial_seed() for generator in split_argument(request, "generator")] == [1, 2, 3]
    assert split_argument(request, "num_images_per_prompt") == [1, 1, 1]
    whole = make_request(prompt=PROMPTS, negative_prompt="x", guidance_scale=3.0)
    assert split_argument(whole, "negative_prompt") == ["x", "x", "x"]
    assert split_argument(whole, "guidance_scale") == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("name", ["latents", "audio_latents", "prior_latents"])
def test_latents_and_seeds_are_split_per_image_of_a_prompt(name: str) -> None:
    latents = torch.arange(4.0).reshape(4, 1)
    request = make_request(prompt=["a", "b"], num_images_per_prompt=2, seed=[4, 3, 2, 1])
    request = request.with_arguments(**{name: latents})
    chunks = split_request(request, 1)
    assert [chunk.arguments["prompt"] for chunk in chunks] == [["a"], ["a"], ["b"], ["b"]]
    assert [chunk.arguments[name].tolist() for chunk in chunks] == [[[0.0]], [[1.0]], [[2.0]], [[3.0]]]
    assert [chunk.seeds for chunk in chunks] == [(4,), (3,), (2,), (1,)]
    assert [chunk.images for chunk in chunks] == [1, 1, 1, 1]
    assert [chunk.arguments["num_images_per_prompt"] for chunk in chunks] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timesteps", [900, 500]),
        ("sigmas", [1.0, 0.5]),
        ("callback_on_step_end_tensor_inputs", ["latents", "prompt_embeds"]),
        ("ip_adapter_image_embeds", [torch.ones(1), torch.ones(1)]),
        ("cross_attention_kwargs", {"scale": 1.0}),
    ],
)
def test_arguments_of_the_whole_call_are_not_split(name: str, value: Any) -> None:
    assert split_argument(make_request(prompt=["a", "b"], **{name: value}), name) == [value, value]


@pytest.mark.parametrize("name", ["skip_guidance_layers", "text_encoder_out_layers", "adapter_conditioning_scale"])
def test_lists_of_numbers_are_not_split_except_class_labels(name: str) -> None:
    request = CallRequest({"prompt": ["a", "b"], name: [1, 2]}, 2, 1, frozenset({"prompt", name}))
    assert split_argument(request, name) == [[1, 2], [1, 2]]
    labels = CallRequest({"class_labels": [5, 6]}, 2, 1, frozenset({"class_labels"}))
    assert split_argument(labels, "class_labels") == [[5], [6]]


def test_more_than_one_image_per_call() -> None:
    request = make_request(prompt=["a", "b", "c", "d", "e"], seed=1)
    assert split_argument(request, "prompt", 2) == [["a", "b"], ["c", "d"], ["e"]]
    assert [chunk.seeds for chunk in split_request(request, 2)] == [(1, 2), (3, 4), (5,)]
    several = make_request(prompt=["a", "b", "c"], num_images_per_prompt=2)
    chunks = split_request(several, 4)
    assert [chunk.arguments["prompt"] for chunk in chunks] == [["a", "b"], ["c"]]
    assert [chunk.images for chunk in chunks] == [4, 2]
    assert sum(chunk.images for chunk in split_request(several, 3)) == 6


def test_a_shared_input_image_is_repeated_per_seed() -> None:
    accepts = frozenset({"prompt", "image", "strength", "num_images_per_prompt"})

    def repeat(image: Any, prompts: int, each: int, more: frozenset[str] = frozenset()) -> Any:
        request = CallRequest({"image": image}, prompts, each, accepts | more, tuple(range(prompts * each)))
        return split_request(request, None)[0].arguments["image"]

    first, second = make_image(8, seed=1), make_image(8, seed=2)
    assert repeat(first, 2, 1) == [first, first]
    assert repeat([first], 2, 1) == [first, first]
    assert repeat([first, second], 2, 2) == [first, first, second, second]
    assert repeat(first, 1, 3) == [first] * 3
    assert repeat(first, 2, 2, frozenset({"image_embeds"})) == [first, first]
    assert repeat(torch.ones(1, 3, 8, 8), 3, 1).shape == (3, 3, 8, 8)
    assert repeat([[first, second]], 2, 1) == [[first, second]]
    unseeded = CallRequest({"image": first}, 2, 1, accepts)
    assert split_request(unseeded, None)[0].arguments["image"] is first


# Results


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
    assert join_results([outputs[0]]) is outputs[0]


def test_calls_share_one_progress_bar() -> None:
    created: list[dict[str, Any]] = []

    class Bar:
        done = 0
        closed = False

        def update(self, count: int = 1) -> None:
            self.done += count

        def close(self) -> None:
            self.closed = True

    def make(**options: Any) -> Bar:
        created.append(options)
        return Bar()

    progress = SharedProgress(3)
    for call in range(3):
        if call < 2:
            with progress.begin(make, total=4) as bar:
                for _ in range(4):
                    bar.update()
        else:
            assert list(progress.begin(make, iter("abcd"))) == list("abcd")
    assert created == [{"total": 12}]
    assert progress.bar.done == 12
    assert not progress.bar.closed
    progress.close()
    assert progress.bar.closed


# Pipelines on a virtual MPS device

CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "prompts": (TEXT_TO_IMAGE, {"prompt": PROMPTS}),
    "negative prompts": (TEXT_TO_IMAGE, {"prompt": PROMPTS[:2], "negative_prompt": ["grey", "dark"]}),
    "images per prompt": (TEXT_TO_IMAGE, {"prompt": PROMPTS[0], "num_images_per_prompt": 3}),
    "both": (TEXT_TO_IMAGE, {"prompt": PROMPTS[:2], "negative_prompt": ["grey", "dark"], "num_images_per_prompt": 2}),
    "input images": (
        IMAGE_TO_IMAGE,
        {"prompt": PROMPTS[:2], "image": [make_image(32, seed=1), make_image(32, seed=2)]},
    ),
}


@NEEDS_RECIPES
def test_a_split_batch_equals_the_batch_of_the_cpu() -> None:
    def use(accelerator: VirtualAccelerator) -> dict[str, tuple[float, list[int], int, list[str]]]:
        warnings.simplefilter("ignore")
        outcomes = {}
        for label, (name, arguments) in CALLS.items():
            plain = make_pipe(name)
            plain.scheduler = make_scheduler("EulerAncestralDiscrete", plain.scheduler)
            placed = anyaccel.place(copy.deepcopy(plain), accelerator.name, dtype=torch.float32)
            rows: list[int] = []
            placed.unet.register_forward_pre_hook(lambda module, args, rows=rows: rows.append(len(args[0])))
            whole = recipes()[name].call() | arguments | {"output_type": "latent", "num_inference_steps": 3}
            expected = plain(**whole | {"generator": make_generator(5)}).images
            accelerator.ledger.clear()
            latents = placed(**whole | {"generator": make_generator(5)}).images.cpu()
            bad = [row.limit for row in accelerator.ledger.rows() if row.effect in ("error", "wrong")]
            outcomes[label] = float((latents - expected).abs().max()), rows, len(expected), bad
        return outcomes

    for label, (difference, rows, images, bad) in run_forked("mps", use, strict=True).items():
        assert difference < 1e-4, label
        assert set(rows) == {2}, f"{label}: each call must have one image with guidance"
        assert len(rows) >= images, label
        assert bad == [], label


@NEEDS_RECIPES
def test_a_batch_of_prompt_embeddings() -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[float, tuple[int, ...]]:
        warnings.simplefilter("ignore")
        plain = make_pipe(TEXT_TO_IMAGE)
        width = plain.unet.config.cross_attention_dim
        embeds, negative = torch.randn(2, 3, 77, width, generator=make_generator(1))
        placed = anyaccel.place(copy.deepcopy(plain), accelerator.name, dtype=torch.float32)
        arguments: dict[str, Any] = {"num_inference_steps": 2, "output_type": "latent", "height": 16, "width": 16}
        expected = plain(
            prompt_embeds=embeds, negative_prompt_embeds=negative, generator=make_generator(5), **arguments
        ).images
        moved = {"prompt_embeds": embeds.to("mps"), "negative_prompt_embeds": negative}
        latents = placed(**moved, generator=make_generator(5), **arguments).images.cpu()
        return float((latents - expected).abs().max()), tuple(latents.shape[:1])

    difference, images = run_forked("mps", use, strict=True)
    assert images == (3,)
    assert difference < 1e-4


@NEEDS_RECIPES
def test_every_output_type() -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        warnings.simplefilter("ignore")
        pipe = anyaccel.place(make_pipe(TEXT_TO_IMAGE), accelerator.name, dtype=torch.float32)
        arguments = {"prompt": PROMPTS[:2], "num_inference_steps": 2, "height": 16, "width": 16, "seed": [3, 4]}

        def generate(**more: Any) -> Any:
            return pipe(**arguments | more)

        array = generate(output_type="np")
        assert array.images.shape == (2, 16, 16, 3)
        assert array.seeds == (3, 4)
        assert array.plan == pipe.plan
        assert not numpy.allclose(array.images[0], array.images[1])
        tensor = generate(output_type="pt").images
        assert tensor.shape == (2, 3, 16, 16)
        numpy.testing.assert_allclose(tensor.permute(0, 2, 3, 1).cpu().numpy(), array.images, atol=1e-5)
        images = generate(output_type="pil").images
        assert [image.size for image in images] == [(16, 16), (16, 16)]
        arrays = [numpy.asarray(image, dtype=float) / 255 for image in images]
        numpy.testing.assert_allclose(numpy.stack(arrays), array.images, atol=3e-3)
        assert generate(output_type="latent").images.shape[0] == 2
        as_tuple = generate(output_type="np", return_dict=False)
        assert isinstance(as_tuple, tuple)
        numpy.testing.assert_allclose(as_tuple[0], array.images)

    run_forked("mps", use, strict=True)


@NEEDS_RECIPES
def test_a_split_batch_has_one_progress_bar() -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[str, str]:
        warnings.simplefilter("ignore")
        pipe = anyaccel.place(make_pipe(TEXT_TO_IMAGE), accelerator.name, dtype=torch.float32)
        pipe.scheduler = make_scheduler("DDIM", pipe.scheduler)
        pipe.set_progress_bar_config(disable=False, mininterval=0)
        written = []
        for prompts in (PROMPTS, PROMPTS[:1]):
            with contextlib.redirect_stderr(io.StringIO()) as stream:
                pipe(prompt=prompts, num_inference_steps=4, height=16, width=16, output_type="latent", seed=1)
            written.append(stream.getvalue())
        return written[0], written[1]

    batch, single = run_forked("mps", use, strict=True)
    for text, total in ((batch, 12), (single, 4)):
        counts = [(int(done), int(whole)) for done, whole in re.findall(r"(\d+)/(\d+) \[", text)]
        assert {whole for _, whole in counts} == {total}
        assert [done for done, _ in counts] == sorted(done for done, _ in counts), "the progress bar restarted"
        assert counts[-1] == (total, total)
        assert text.count("\n") == 1, "there must be one progress bar"


@NEEDS_RECIPES
def test_a_callback_runs_for_every_image_and_its_failure_leaves_the_pipeline_usable() -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        warnings.simplefilter("ignore")
        pipe = anyaccel.place(make_pipe(TEXT_TO_IMAGE), accelerator.name, dtype=torch.float32)
        pipe.scheduler = make_scheduler("DDIM", pipe.scheduler)
        arguments = {"num_inference_steps": 2, "height": 16, "width": 16, "output_type": "latent", "seed": 1}
        steps: list[tuple[int, int]] = []

        def record(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
            steps.append((step, len(values["latents"])))
            return values

        before = pipe(prompt=PROMPTS[:2], callback_on_step_end=record, **arguments).images
        assert steps == [(0, 1), (1, 1), (0, 1), (1, 1)]

        def fail(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
            raise KeyError("raised by the callback")

        with pytest.raises(KeyError):
            pipe(prompt=PROMPTS[:2], callback_on_step_end=fail, **arguments)
        assert torch.equal(pipe(prompt=PROMPTS[:2], **arguments).images.cpu(), before.cpu())

    run_forked("mps", use, strict=True)


@pytest.mark.long
@NEEDS_RECIPES
@pytest.mark.parametrize("name", ["stable-diffusion-image-variation", "stable-video-diffusion", "dit"])
def test_pipelines_without_a_prompt_are_split_by_their_inputs(name: str) -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[float, int]:
        warnings.simplefilter("ignore")
        pipe: Any = anyaccel.place(recipes()[name].make(), accelerator.name, dtype=torch.float32)
        call = recipes()[name].call()
        del call["generator"]
        if name == "dit":
            inputs: tuple[str, list[Any]] = ("class_labels", [1, 2])
        else:
            inputs = ("image", [make_image(call["image"].size[0], seed=seed) for seed in (1, 2)])
        both = pipe(**call | {inputs[0]: inputs[1]}, seed=[5, 9]).to_tuple()[0]
        second = pipe(**call | {inputs[0]: [inputs[1][1]]}, seed=9).to_tuple()[0]
        return float(numpy.abs(numpy.asarray(both[1]) - numpy.asarray(second[0])).max()), len(both)

    difference, images = run_forked("mps", use)
    assert images == 2
    assert difference < 1e-4


@NEEDS_RECIPES
@pytest.mark.parametrize(
    ("prompts", "each", "images_per_call"),
    [(4, 1, 2), (3, 1, 2), (2, 3, 4), (3, 2, 4)],
)
def test_one_generator_for_chunks_of_different_sizes(prompts: int, each: int, images_per_call: int) -> None:
    plain = make_pipe(TEXT_TO_IMAGE)
    placed = anyaccel.place(copy.deepcopy(plain), "cpu", dtype=torch.float32, images_per_call=images_per_call)
    arguments: dict[str, Any] = {"num_inference_steps": 2, "height": 16, "width": 16, "output_type": "latent"}
    arguments |= {"prompt": (PROMPTS * 2)[:prompts], "num_images_per_prompt": each}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = plain(generator=make_generator(5), **arguments).images
        latents = placed(generator=make_generator(5), **arguments).images
    assert (latents - expected).abs().max() < 1e-4
