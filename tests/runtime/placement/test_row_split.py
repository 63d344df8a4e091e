"""Split batches: models run a few images at a time, and everything else is as in one call of stock diffusers."""

from __future__ import annotations

import functools
import logging
import types
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import diffusers.models.embeddings
import numpy
import pytest
import torch
from diffusers.models import attention_dispatch, attention_processor
from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0, SlicedAttnProcessor
from peft import LoHaConfig, LoKrConfig
from torch.overrides import TorchFunctionMode

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.forward_overrides import Slot, set_override
from anyaccel.recipes import recipes
from anyaccel.runtime.module_fingerprint import is_in_training
from anyaccel.runtime.placement.row_split import find_obstacle, find_split_obstacle
from tests.conftest import NEEDS_RECIPES
from tests.runtime.row_split_sweep import CASES, compare_recipe

pytestmark = [NEEDS_RECIPES, pytest.mark.usefixtures("pipelines_imported"), pytest.mark.filterwarnings("ignore")]

NAME = "stable-diffusion"


def make_generator(seed: int = 5) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def make_pair(name: str = NAME, **options: Any) -> tuple[Any, Any, list[int]]:
    """Return a stock pipeline, a placed pipeline, and a list of the rows with which its UNet runs."""
    stock: Any = recipes()[name].make()
    placed: Any = anyaccel.place(recipes()[name].make(), "cpu", dtype="float32", **{"images_per_call": 1, **options})
    return stock, placed, record_rows(placed.unet)


def record_rows(model: torch.nn.Module) -> list[int]:
    rows: list[int] = []

    def record(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows.append(len(args[0]))
        return forward(*args, **kwargs)

    set_override(model, Slot.CAPTURE, record)
    return rows


def call(pipe: Any, name: str = NAME, **changes: Any) -> Any:
    arguments = {**recipes()[name].call(), "generator": make_generator(), "num_images_per_prompt": 3, **changes}
    return pipe(**{key: value for key, value in arguments.items() if value is not None}).images


def check_unsplit(placed: Any, rows: list[int], caplog: pytest.LogCaptureFixture, reason: str, **changes: Any) -> Any:
    """Check that the UNet runs whole batches, with one warning."""
    with caplog.at_level(logging.WARNING, "anyaccel"):
        images = call(placed, **changes)
        call(placed, **changes)
    assert set(rows) == {6}, "three images with guidance"
    messages = [record.getMessage() for record in caplog.records if "cannot be split: unet" in record.getMessage()]
    assert len(messages) == 1
    assert reason in messages[0]
    return images


def test_models_run_one_image_at_a_time() -> None:
    stock, placed, rows = make_pair()
    expected, images = call(stock), call(placed)
    assert set(rows) == {2}, "one image with guidance"
    numpy.testing.assert_allclose(images, expected, atol=1e-4)
    assert not placed.vae.use_slicing, "slicing is enabled only during the call"
    placed.vae.enable_slicing()
    call(placed)
    assert placed.vae.use_slicing


@pytest.mark.parametrize(("images", "at_a_time", "rows"), [(3, 2, [4, 2]), (4, 3, [6, 2]), (2, 2, [4])])
def test_several_images_at_a_time(images: int, at_a_time: int, rows: list[int]) -> None:
    stock, placed, seen = make_pair(images_per_call=at_a_time)
    numpy.testing.assert_allclose(
        call(placed, num_images_per_prompt=images), call(stock, num_images_per_prompt=images), atol=1e-4
    )
    assert seen[: len(rows)] == rows


def test_without_guidance_each_row_is_an_image() -> None:
    stock, placed, rows = make_pair()
    numpy.testing.assert_allclose(call(placed, guidance_scale=1.0), call(stock, guidance_scale=1.0), atol=1e-4)
    assert set(rows) == {1}


def test_the_vae_runs_one_image_at_a_time() -> None:
    _, placed, _ = make_pair()
    rows = record_rows(placed.vae.decoder)
    call(placed)
    assert rows == [1, 1, 1]


def test_callbacks_see_the_whole_batch() -> None:
    seen: list[tuple[int, int]] = []

    def mix(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        seen.append((step, len(values["latents"])))
        return {"latents": values["latents"] + values["latents"].flip(0)}

    stock, placed, rows = make_pair()
    expected = call(stock, callback_on_step_end=mix)
    steps, seen[:] = list(seen), []
    numpy.testing.assert_allclose(call(placed, callback_on_step_end=mix), expected, atol=1e-4)
    assert seen == steps
    assert set(rows) == {2}


def test_generators_and_results_are_those_of_one_call() -> None:
    stock, placed, rows = make_pair()
    shared = [make_generator(), make_generator()]
    for generators in ([shared[0]] * 3, [make_generator(seed) for seed in range(3)]):
        other = [shared[1]] * 3 if generators[0] is shared[0] else [make_generator(seed) for seed in range(3)]
        numpy.testing.assert_allclose(call(placed, generator=other), call(stock, generator=generators), atol=1e-4)
        assert [one.get_state().tolist() for one in other] == [one.get_state().tolist() for one in generators]
    torch.manual_seed(3)
    expected = call(stock, generator=None)
    after = torch.rand(1)
    torch.manual_seed(3)
    numpy.testing.assert_allclose(call(placed, generator=None), expected, atol=1e-4)
    assert torch.rand(1) == after
    assert set(rows) == {2}
    with pytest.raises(ValueError, match="negative_prompt"):
        call(placed, prompt=["a", "b"], negative_prompt=["c"])


def test_a_batch_with_one_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    _, placed, _ = make_pair()
    placed.set_progress_bar_config(disable=False, mininterval=0)
    call(placed, num_inference_steps=4)
    text = capsys.readouterr().err
    assert "4/4" in text or "5/5" in text
    assert text.count("\n") == 1


def test_a_device_with_unreliable_batches() -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[float, list[int], list[str]]:
        warnings.simplefilter("ignore")
        stock: Any = recipes()[NAME].make()
        placed: Any = anyaccel.place(recipes()[NAME].make(), accelerator.name, dtype="float32")
        rows = record_rows(placed.unet)
        accelerator.ledger.clear()
        images = call(placed)
        bad = [row.limit for row in accelerator.ledger.rows() if row.effect in ("error", "wrong")]
        return float(numpy.abs(images - call(stock)).max()), rows, bad

    difference, rows, bad = run_forked("mps", use, strict=True)
    assert difference < 1e-4
    assert set(rows) == {2}
    assert bad == []


# Models that are not split


class SharedAttention(AttnProcessor2_0):
    """Attention to the mean of all images."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Add the mean of all rows."""
        return super().__call__(attn, hidden_states + hidden_states.mean(0, keepdim=True), *args, **kwargs)


def test_attention_across_images_is_not_split(caplog: pytest.LogCaptureFixture) -> None:
    stock, placed, rows = make_pair()
    for pipe in (stock, placed):
        pipe.unet.set_attn_processor(SharedAttention())
    images = check_unsplit(placed, rows, caplog, "unet (UNet2DConditionModel): SharedAttention may combine the images")
    numpy.testing.assert_allclose(images, call(stock), atol=1e-4)


@pytest.mark.parametrize("name", ["pag-stable-diffusion"])
def test_processors_that_a_pipeline_sets_during_a_call_are_not_split(name: str, caplog: Any) -> None:
    stock: Any = recipes()[name].make()
    placed: Any = anyaccel.place(recipes()[name].make(), "cpu", dtype="float32", images_per_call=1)
    rows = record_rows(placed.unet)
    with caplog.at_level(logging.WARNING, "anyaccel"):
        images = call(placed, name)
    assert set(rows) == {9}, "three images with both kinds of guidance"
    assert "the attention processor PAGCFGIdentitySelfAttnProcessor2_0 may combine" in caplog.text
    numpy.testing.assert_allclose(images, call(stock, name), atol=1e-4)


def mix_rows(*values: Any) -> Any:
    output = values[-1]
    return output + output.flip(0)


def patch_forward(unet: Any) -> None:
    original = unet.forward

    def forward(self: Any, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(sample + sample.flip(0), *args, **kwargs)

    unet.forward = types.MethodType(forward, unet)


class Mixing(torch.nn.Conv2d):
    """A convolution that adds the rows in reverse order."""

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        """Return the convolution."""
        return super().forward(sample + sample.flip(0))


def replace_layer(unet: Any) -> None:
    layer = Mixing(4, unet.conv_in.out_channels, 3, padding=1)
    layer.load_state_dict(unet.conv_in.state_dict())
    unet.conv_in = layer


def replace_layer_forward(unet: Any) -> None:
    layer = unet.conv_in
    layer.forward = lambda sample: mix_rows(torch.nn.Conv2d.forward(layer, sample))


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda unet: unet.conv_in.register_forward_hook(mix_rows), "a hook is registered on Conv2d"),
        (patch_forward, "the forward of UNet2DConditionModel is replaced"),
        (replace_layer, "Mixing may combine the images"),
        (replace_layer_forward, "a replaced forward of Conv2d"),
    ],
)
@pytest.mark.parametrize("before_placing", [False, True])
def test_models_that_a_user_changed_are_not_split(
    edit: Callable[[Any], Any], reason: str, before_placing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stock: Any = recipes()[NAME].make()
    edit(stock.unet)
    pipe: Any = recipes()[NAME].make()
    if before_placing:
        edit(pipe.unet)
    placed: Any = anyaccel.place(pipe, "cpu", dtype="float32", images_per_call=1)
    if not before_placing:
        edit(placed.unet)
    expected, images = call(stock), call(placed)
    numpy.testing.assert_allclose(images, expected, atol=1e-4)
    assert reason in caplog.text


class CallableObject:
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def raise_error(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError


PATCHES = {
    "function": raise_error,
    "partial": functools.partial(raise_error, 1),
    "mock": mock.MagicMock(),
    "object": CallableObject(),
    "class": CallableObject,
    "decorated by torch": torch.no_grad()(raise_error),
    "cached": functools.lru_cache(raise_error),
}


@pytest.fixture(scope="module")
def unet() -> Any:
    stock: Any = recipes()[NAME].make()
    return stock.unet


@pytest.mark.parametrize("kind", PATCHES)
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch.nn.functional, "scaled_dot_product_attention"),
        (torch, "cat"),
        (torch.Tensor, "softmax"),
        (diffusers.models.embeddings, "get_timestep_embedding"),
        (attention_processor, "deprecate"),
        (Attention, "get_attention_scores"),
        (AttnProcessor2_0, "__call__"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_patched_functions_are_found(unet: Any, owner: Any, name: str, kind: str, monkeypatch: Any) -> None:
    with torch.no_grad():
        assert find_obstacle(unet) == ""
        with monkeypatch.context() as patches:
            patches.setattr(owner, name, PATCHES[kind])
            assert name in find_obstacle(unet)
        assert find_obstacle(unet) == ""


@pytest.mark.parametrize("kind", [functools.partialmethod, classmethod, staticmethod, property])
def test_patched_methods_are_found(unet: Any, kind: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Attention, "get_attention_scores", kind(raise_error))
    with torch.no_grad():
        assert "a patched Attention.get_attention_scores" in find_obstacle(unet)


class Descriptor:
    """An attribute of a class that returns a function of the user."""

    def __get__(self, owner: Any, kind: Any) -> Any:
        return raise_error


def test_a_descriptor_and_an_attention_backend_of_the_user_are_found(unet: Any, monkeypatch: Any) -> None:
    backends = attention_dispatch._AttentionBackendRegistry._backends
    with torch.no_grad(), monkeypatch.context() as patches:
        patches.setitem(backends, next(iter(backends)), raise_error)
        assert "attention backend" in find_obstacle(unet)
    monkeypatch.setattr(Attention, "get_attention_scores", Descriptor())
    with torch.no_grad():
        assert "a patched Attention.get_attention_scores" in find_obstacle(unet)


@pytest.mark.parametrize(
    ("make_layer", "obstacle"),
    [
        (lambda: torch.nn.BatchNorm2d(4, track_running_stats=False), "statistics of the batch"),
        (lambda: torch.nn.Softmax(dim=0), "Softmax"),
        (lambda: torch.nn.TransformerEncoderLayer(4, 1), "TransformerEncoderLayer"),
        (lambda: torch.nn.utils.spectral_norm(torch.nn.Linear(4, 4)), "a hook is registered on Linear"),
        (lambda: torch.nn.BatchNorm2d(4), ""),
        (lambda: torch.nn.MultiheadAttention(4, 1, batch_first=True), ""),
        (lambda: torch.nn.utils.weight_norm(torch.nn.Linear(4, 4)), ""),
    ],
)
def test_layers_of_torch_that_combine_images_are_found(
    make_layer: Callable[[], torch.nn.Module], obstacle: str
) -> None:
    model: Any = recipes()[NAME].make().unet
    model.mid_block.other = make_layer().eval()
    with torch.no_grad():
        found = find_obstacle(model)
    assert obstacle in found if obstacle else found == ""


def test_a_model_is_not_split_while_a_mode_is_active(caplog: pytest.LogCaptureFixture) -> None:
    class Mix(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            is_attention = func is torch.nn.functional.scaled_dot_product_attention
            return (result + result.flip(0)) / 2 if is_attention else result

    stock, placed, rows = make_pair()
    with Mix():
        expected, images = call(stock), check_unsplit(placed, rows, caplog, "mode is active")
    numpy.testing.assert_allclose(images, expected, atol=1e-4)


def test_a_partial_function_in_a_module_of_diffusers_is_not_split(monkeypatch: Any, caplog: Any) -> None:
    def mix(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        return result * (1 + 0.1 * len(result))

    stock, placed, rows = make_pair()
    original = diffusers.models.embeddings.get_timestep_embedding
    monkeypatch.setattr(diffusers.models.embeddings, "get_timestep_embedding", functools.partial(mix, original))
    expected = call(stock)
    images = check_unsplit(placed, rows, caplog, "a patched diffusers.models.embeddings.get_timestep_embedding")
    numpy.testing.assert_allclose(images, expected, atol=1e-4)


def test_a_hook_on_the_model_itself_sees_the_whole_batch() -> None:
    stock, placed, rows = make_pair()
    for pipe in (stock, placed):
        pipe.unet.register_forward_hook(lambda module, args, output: (mix_rows(output[0]),))
    numpy.testing.assert_allclose(call(placed), call(stock), atol=1e-4)
    assert set(rows) == {2}


def test_an_unknown_argument_is_not_split(caplog: pytest.LogCaptureFixture) -> None:
    stock, placed, rows = make_pair()
    mask = torch.tensor([[1.0], [0.5], [2.0]]).repeat(2, 1).view(6, 1, 1)
    arguments: dict[str, Any] = {"cross_attention_kwargs": {"attention_scale": mask}}
    images = check_unsplit(placed, rows, caplog, "'cross_attention_kwargs.attention_scale' is not known", **arguments)
    numpy.testing.assert_allclose(images, call(stock, **arguments), atol=1e-4)


@pytest.mark.parametrize("config", [LoHaConfig, LoKrConfig])
def test_adapters_that_draw_random_numbers(config: Any) -> None:
    recipe, images = recipes()[NAME], []
    arguments = {**recipe.call(), "num_images_per_prompt": 2, "num_inference_steps": 2}
    for split in (False, True):
        pipe: Any = recipe.make()
        if split:
            pipe = anyaccel.place(pipe, "cpu", images_per_call=1)
        torch.manual_seed(1)
        pipe.unet.add_adapter(config(r=2, target_modules=["to_q", "to_v"], init_weights=False))
        assert is_in_training(pipe.unet)
        torch.manual_seed(2)
        images.append((pipe(**{**arguments, "generator": None}).images, torch.get_rng_state()))
    numpy.testing.assert_allclose(images[0][0], images[1][0], atol=1e-4)
    assert torch.equal(images[0][1], images[1][1])


def test_dropped_labels() -> None:
    transformer: Any = recipes()["dit"].make().transformer
    with torch.no_grad():
        assert find_obstacle(transformer) == ""
        assert "labels are dropped at random" in find_obstacle(transformer.train())


def test_gradients_dropout_and_caches() -> None:
    unet: Any = recipes()[NAME].make().unet
    with torch.no_grad():
        assert find_obstacle(unet) == ""
        unet.train()
        assert find_obstacle(unet) == "", "dropout with probability 0"
        unet.mid_block.dropout = torch.nn.Dropout(0.1)
        assert "dropout is active" in find_obstacle(unet)
    assert find_obstacle(unet.eval()) == "gradients are enabled"
    transformer: Any = recipes()["flux"].make().transformer
    assert find_split_obstacle({"transformer": transformer}) == ""
    from diffusers import FirstBlockCacheConfig

    transformer.enable_cache(FirstBlockCacheConfig(threshold=0.2))
    assert "the hook fbc_" in find_split_obstacle({"transformer": transformer})
    assert "it is not known whether its rows" in find_split_obstacle({"other": torch.nn.Linear(1, 1)})
    with torch.no_grad():
        handle = torch.nn.modules.module.register_module_forward_hook(lambda *values: None)
        try:
            assert find_obstacle(recipes()[NAME].make().unet) == "a global hook is registered"
        finally:
            handle.remove()


@pytest.mark.parametrize("processor", [AttnProcessor, AttnProcessor2_0, lambda: SlicedAttnProcessor(1)])
def test_other_processors_of_diffusers_are_split(processor: Callable[[], Any]) -> None:
    stock, placed, rows = make_pair()
    for pipe in (stock, placed):
        pipe.unet.set_attn_processor(processor())
    numpy.testing.assert_allclose(call(placed), call(stock), atol=1e-4)
    assert set(rows) == {2}


def test_a_wrong_number_of_images_changes_only_the_memory_use() -> None:
    """A pipeline of the user makes one image of two prompts: anyaccel counts two images."""
    import diffusers

    class Joined(diffusers.StableDiffusionPipeline):
        def __call__(self, prompt: Any, **kwargs: Any) -> Any:
            return super().__call__(" and ".join(prompt), **kwargs)

    stock: Any = Joined(**recipes()[NAME].make().components, requires_safety_checker=False)
    placed = anyaccel.place(
        Joined(**recipes()[NAME].make().components, requires_safety_checker=False), "cpu", dtype="float32",
        images_per_call=1,
    )  # fmt: skip
    for pipe in (stock, placed):
        pipe.set_progress_bar_config(disable=True)
    arguments: dict[str, Any] = {"prompt": ["a fox", "a hen"], "num_images_per_prompt": None}
    numpy.testing.assert_allclose(call(placed, **arguments), call(stock, **arguments), atol=1e-4)


# Recipes


@pytest.mark.parametrize("name", ["controlnet-xl", "flux-inpaint", "animate-diff", "qwen-image", "z-image"])
def test_split_batches_of_some_recipes(name: str) -> None:
    outcome = compare_recipe(name, ("images",))["images"]
    assert outcome["status"] == "equal", outcome


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(recipes()))
def test_split_batches_of_every_recipe(name: str) -> None:
    """Every batch that stock diffusers accepts has the same result, with split or with unsplit models."""
    for case, outcome in compare_recipe(name, CASES).items():
        assert outcome["status"] != "different", (case, outcome)


def make_ltx(**config: Any) -> Any:
    """Return an LTX pipeline with the VAE structure of LTX-Video 0.9.1."""
    pipe: Any = recipes()["ltx"].make()
    structure = {
        "block_out_channels": (8,) * 4, "decoder_block_out_channels": (16, 32, 64), "layers_per_block": (1,) * 5,
        "decoder_layers_per_block": (1,) * 4, "spatio_temporal_scaling": (True, True, False, False),
        "decoder_spatio_temporal_scaling": (True,) * 3, "upsample_residual": (True,) * 3, "upsample_factor": (2,) * 3,
        "decoder_inject_noise": (False,) * 4, "patch_size": 1, "patch_size_t": 1,
    }  # fmt: skip
    own = {name: value for name, value in pipe.vae.config.items() if not name.startswith("_")}
    torch.manual_seed(0)
    pipe.vae = type(pipe.vae)(**{**own, **structure, **config}).eval()
    for name, parameter in pipe.vae.named_parameters():
        if "per_channel" in name:
            parameter.data.fill_(0.5)
    return pipe


@pytest.mark.parametrize("config", [{"decoder_inject_noise": (True,) * 4}, {"timestep_conditioning": True}])
def test_a_vae_that_cannot_be_sliced_is_not_split(config: dict[str, Any]) -> None:
    def generate(pipe: Any) -> tuple[Any, torch.Tensor]:
        torch.manual_seed(5)
        arguments = {**recipes()["ltx"].call(), "prompt": ["a fox", "a house"], "generator": make_generator()}
        return numpy.asarray(pipe(**arguments).frames), torch.get_rng_state()

    stock, state = generate(make_ltx(**config))
    placed = anyaccel.place(make_ltx(**config), "cpu", dtype="float32", images_per_call=1)
    images, placed_state = generate(placed)
    numpy.testing.assert_allclose(images, stock, atol=1e-4)
    assert torch.equal(placed_state, state)
