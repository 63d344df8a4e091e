"""Models of a placed pipeline can be copied, traced, hooked and patched like plain models."""

import copy
import functools
import gc
import io
import pickle
import warnings
import weakref
from collections import OrderedDict, defaultdict
from typing import Any

import numpy
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.recipes import recipes, run
from anyaccel.upstream.torch_internals import read_function_modes
from tests.conftest import NEEDS_RECIPES
from tests.runtime.speed.small_pipelines import make_small

pytestmark = NEEDS_RECIPES
RECIPE = "stable-diffusion"


@pytest.fixture
def pipe() -> Any:
    return anyaccel.place(recipes()[RECIPE].make(), "cpu", dtype="float32")


@pytest.fixture
def stock() -> Any:
    return recipes()[RECIPE].make()


ARGUMENTS = (torch.ones(2, 4, 8, 8), torch.tensor(3.0), torch.ones(2, 7, 32))


class Denoiser(torch.nn.Module):
    """A user's module that calls a denoiser."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.unet(sample, timestep, prompt, return_dict=False)[0]
        return output


@torch.no_grad()
def test_copies_run_their_own_weights(pipe: Any, stock: Any) -> None:
    expected = stock.unet(*ARGUMENTS).sample
    saved = io.BytesIO()
    torch.save(pipe.unet, saved)
    saved.seek(0)
    copies = [copy.deepcopy(pipe.unet), pickle.loads(pickle.dumps(pipe.unet)), torch.load(saved, weights_only=False)]
    for copied in copies:
        assert torch.equal(copied(*ARGUMENTS).sample, expected)
        copied.conv_out.weight.zero_()
        copied.conv_out.bias.zero_()
        assert not copied(*ARGUMENTS).sample.any()
    assert torch.equal(pipe.unet(*ARGUMENTS).sample, expected)


def make_denoiser() -> tuple[Denoiser, torch.Tensor]:
    """Return a module that calls a placed UNet, and the output of the plain one."""
    pipe: Any = anyaccel.place(make_small(RECIPE), "cpu", dtype="float32")
    return Denoiser(pipe.unet).eval(), make_small(RECIPE).unet(*ARGUMENTS).sample


@pytest.mark.long
@torch.no_grad()
def test_models_can_be_traced_exported_and_compiled() -> None:
    model, expected = make_denoiser()
    trace: Any = torch.jit.trace
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of tracing and of its deprecation
        torch.testing.assert_close(trace(model, ARGUMENTS, check_trace=False)(*ARGUMENTS), expected)
    exported = torch.export.export(model, ARGUMENTS, strict=False)
    torch.testing.assert_close(exported.module()(*ARGUMENTS), expected)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*ARGUMENTS), expected)


@pytest.mark.slow  # strict export traces with Dynamo, as torch.compile above
@torch.no_grad()
def test_models_can_be_exported_with_dynamo() -> None:
    model, expected = make_denoiser()
    exported = torch.export.export(model, ARGUMENTS, strict=True)
    torch.testing.assert_close(exported.module()(*ARGUMENTS), expected)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_models_work_under_vmap(pipe: Any, stock: Any) -> None:
    samples = torch.stack([ARGUMENTS[0], 2 * ARGUMENTS[0]])

    def run_with(unet: Any) -> torch.Tensor:
        output: torch.Tensor = torch.vmap(lambda sample: unet(sample, *ARGUMENTS[1:]).sample)(samples)
        return output

    torch.testing.assert_close(run_with(pipe.unet), run_with(stock.unet))


class Doubles(ModelHook):  # type: ignore[misc]
    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        return (output[0] * 2, *output[1:]) if isinstance(output, tuple) else output


def test_accelerate_hooks_added_and_removed_between_calls(pipe: Any, stock: Any) -> None:
    recipe = recipes()[RECIPE]
    plain = run(recipe, stock)
    numpy.testing.assert_array_equal(run(recipe, pipe), plain)
    for model in (pipe.unet, stock.unet):
        add_hook_to_module(model, Doubles())
    hooked = run(recipe, stock)
    assert numpy.abs(hooked - plain).max() > 0
    for _ in range(2):
        numpy.testing.assert_array_equal(run(recipe, pipe), hooked)
    for model in (pipe.unet, stock.unet):
        remove_hook_from_module(model)
    for _ in range(2):
        numpy.testing.assert_array_equal(run(recipe, pipe), plain)


def test_later_patches_of_a_model_class_are_used(pipe: Any, stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipes()[RECIPE]
    plain = run(recipe, pipe)
    forward = type(stock.unet).forward

    def patched(self: Any, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(self, sample * 0.5, *args, **kwargs)

    monkeypatch.setattr(type(stock.unet), "forward", patched)
    expected = run(recipe, stock)
    assert numpy.abs(expected - plain).max() > 0
    numpy.testing.assert_array_equal(run(recipe, pipe), expected)


def test_later_patches_of_a_pipeline_class_are_used(pipe: Any, stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipes()[RECIPE]
    run(recipe, pipe)
    calls: list[str] = []
    call, encode = type(stock).__call__, type(stock).encode_prompt

    def patched_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append("call")
        return call(self, *args, **kwargs)

    def patched_encode(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append("encode")
        return tuple(None if item is None else item * 2 for item in encode(self, *args, **kwargs))

    monkeypatch.setattr(type(stock), "__call__", patched_call)
    monkeypatch.setattr(type(stock), "encode_prompt", patched_encode)
    expected = run(recipe, stock)
    calls.clear()
    numpy.testing.assert_array_equal(run(recipe, pipe), expected)
    assert calls == ["call", "encode"]


@pytest.mark.parametrize(("arguments", "expected"), [({}, False), ({"seed": 3}, True)])
def test_float32_calls_on_the_cpu_run_without_a_function_mode(
    pipe: Any, arguments: dict[str, Any], expected: bool
) -> None:
    active = []

    def record_modes(*args: Any) -> dict[str, Any]:
        active.append(bool(read_function_modes()))  # type: ignore[no-untyped-call]
        return {}

    call = {key: value for key, value in recipes()[RECIPE].call().items() if key != "generator"}
    pipe(**call, **arguments, callback_on_step_end=record_modes)
    assert active
    assert set(active) == {expected}


def test_models_are_released_without_garbage_collection() -> None:
    recipe = recipes()[RECIPE]
    pipe: Any = anyaccel.place(recipe.make(), "cpu", dtype="float32")
    run(recipe, pipe)
    models = [weakref.ref(pipe.unet), weakref.ref(pipe.vae)]
    stock: Any = recipe.make()
    run(recipe, stock)
    plain = [weakref.ref(stock.unet), weakref.ref(stock.vae)]
    gc.disable()
    try:
        del pipe, stock
        assert [model() is None for model in models] == [model() is None for model in plain]
    finally:
        gc.enable()


def test_accelerate_prepares_and_unwraps_a_placed_model(pipe: Any, stock: Any) -> None:
    from accelerate import Accelerator

    recipe = recipes()[RECIPE]
    run(recipe, pipe)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    pipe.unet = accelerator.unwrap_model(accelerator.prepare(pipe.unet), keep_fp32_wrapper=False)
    numpy.testing.assert_array_equal(run(recipe, pipe), run(recipe, stock))


def test_traced_decoders_run(pipe: Any, stock: Any) -> None:
    recipe = recipes()[RECIPE]
    expected = run(recipe, stock)
    trace: Any = torch.jit.trace
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        pipe.vae.decoder = trace(pipe.vae.decoder, torch.ones(1, 4, 8, 8))
    numpy.testing.assert_allclose(run(recipe, pipe), expected, atol=1e-5)


def test_options_changed_in_a_callback_leave_the_pipeline_usable(pipe: Any) -> None:
    recipe = recipes()[RECIPE]

    def slice_attention(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        pipe.enable_attention_slicing()
        return values

    call = {**recipe.call(), "output_type": "np"}
    call.pop("generator", None)
    pipe(**call, seed=1, callback_on_step_end=slice_attention)
    first, second = pipe(**call, seed=1).images, pipe(**call, seed=1).images
    numpy.testing.assert_array_equal(first, second)
    pipe.to("cpu", dtype="float32")


def test_tensors_in_dicts_of_any_class_are_moved() -> None:
    def use(accelerator: VirtualAccelerator) -> list[Any]:
        unet: Any = anyaccel.place(recipes()["stable-diffusion-xl"].make(), "hpu", dtype="float32").unet
        width = unet.config.projection_class_embeddings_input_dim - 6 * unet.config.addition_time_embed_dim
        conditions = {"text_embeds": torch.ones(2, width), "time_ids": torch.ones(2, 6)}
        prompt = torch.ones(2, 7, unet.config.cross_attention_dim)
        outputs: list[Any] = []
        kinds: list[Any] = [dict, OrderedDict, functools.partial(defaultdict, list)]
        for kind in kinds:
            with torch.no_grad():
                output = unet(ARGUMENTS[0], 3, prompt, added_cond_kwargs=kind(conditions)).sample
            outputs.append(output.cpu().numpy())
        return outputs

    first, *others = run_forked("hpu", use)
    assert all(numpy.array_equal(first, other) for other in others)
