"""Custom pipeline classes with methods, arguments and attributes that anyaccel also has."""

import copy
import pickle
from typing import Any

import diffusers
import pytest
import torch

import anyaccel
from anyaccel.processes.forked_call import call_in_fork
from anyaccel.recipes import recipes

Stock: Any = diffusers.StableDiffusionPipeline


class CustomPipeline(Stock):  # type: ignore[misc]
    """A pipeline with methods and attributes that the portable class also has."""

    plan = "the pipeline's own attribute"

    @property
    def calls(self) -> list[str]:
        return vars(self).setdefault("own_calls", [])  # type: ignore[no-any-return]

    def __call__(self, prompt: Any, /, *, seed: int = 0, **kwargs: Any) -> Any:
        generator = torch.Generator().manual_seed(seed + 100)
        return super().__call__(prompt, generator=generator, num_inference_steps=2, output_type="np", **kwargs)

    def to(self, device: Any) -> Any:
        self.calls.append("to")
        return super().to(device)

    def enable_attention_slicing(self, slice_size: Any = "auto") -> None:
        self.calls.append("enable_attention_slicing")

    def warmup(self) -> str:
        return "the pipeline's own warmup"


def make(kind: Any) -> Any:
    plain: Any = recipes()["stable-diffusion"].make()
    pipe = kind(**plain.components, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_methods_and_arguments_of_a_custom_pipeline_take_precedence() -> None:
    stock = make(CustomPipeline)
    placed = anyaccel.place(make(CustomPipeline), "cpu", dtype="float32")
    assert placed.calls == ["to"]
    for pipe in (stock, placed):
        pipe.enable_attention_slicing()
        assert pipe.calls[-1] == "enable_attention_slicing"
        assert pipe.warmup() == "the pipeline's own warmup"
        assert pipe.plan == "the pipeline's own attribute"
    expected = stock("a fox", seed=5).images
    assert (placed("a fox", seed=5).images == expected).all()
    assert (placed("a fox", seed=6).images != expected).any()


def test_a_pipeline_may_have_attributes_with_the_names_of_a_modular_one() -> None:
    placed = anyaccel.place(make(Stock), "cpu", dtype="float32")
    call = {"num_inference_steps": 1, "output_type": "np", "height": 16, "width": 16}
    expected = placed("a fox", seed=5, **call).images
    placed.blocks, placed._blocks = [1], [1]
    placed.warmup([(16, 16)])
    assert (placed("a fox", seed=5, **call).images == expected).all()


class SlottedPipeline(Stock):  # type: ignore[misc]
    """A pipeline whose class has `__slots__`."""

    __slots__ = ("factor",)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_copies_have_the_slots_of_a_custom_pipeline(copied: Any) -> None:
    pipe = make(SlottedPipeline)
    object.__setattr__(pipe, "factor", 3)
    placed = copied(anyaccel.place(pipe, "cpu", dtype="float32"))
    assert placed.factor == 3
    assert placed.plan.dtype.value == "float32"


class Scale(torch.nn.Module):
    """A model without the attributes that models of diffusers have."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(2.0))


class PlainModelPipeline(diffusers.DiffusionPipeline):  # type: ignore[misc]
    """A pipeline with such a model."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.register_modules(scale=scale)


def test_a_model_without_dtype_is_named() -> None:
    with pytest.raises(AttributeError):
        PlainModelPipeline(Scale()).to("cpu")
    with pytest.raises(anyaccel.AnyaccelError, match="scale is a Scale, which has no attribute device") as caught:
        anyaccel.place(PlainModelPipeline(Scale()), "cpu")
    assert "ModelMixin" in caught.value.hint


def test_an_instance_attribute_may_be_called_plan() -> None:
    placed = anyaccel.place(make(Stock), "cpu", dtype="float32")
    assert placed.plan.dtype.value == "float32"
    placed.plan = "own"
    assert placed.plan == "own"


class Doubling:
    """An attention processor that changes the output of attention."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return 2 * diffusers.models.attention_processor.AttnProcessor2_0()(attn, hidden_states, **kwargs)


@pytest.mark.parametrize("method", ["enable_attention_slicing", "disable_attention_slicing"])
def test_attention_slicing_replaces_custom_processors(method: str) -> None:
    images = []
    for pipe in (make(Stock), anyaccel.place(make(Stock), "cpu", dtype="float32")):
        call = {"num_inference_steps": 2, "output_type": "np", "height": 16, "width": 16}
        pipe.unet.set_attn_processor(Doubling())
        custom = pipe("a fox", generator=torch.Generator().manual_seed(1), **call).images
        getattr(pipe, method)()
        images.append(pipe("a fox", generator=torch.Generator().manual_seed(1), **call).images)
        assert abs(images[-1] - custom).max() > 1e-3
    assert abs(images[0] - images[1]).max() < 1e-4


def test_batch_size_of_a_pipeline_with_an_input_image_is_not_the_number_of_images() -> None:
    recipe = recipes()["marigold-depth"]
    arguments: Any = recipe.call() | {"batch_size": 4, "generator": [torch.Generator().manual_seed(3)]}
    placed = anyaccel.place(recipe.make(), "cpu", dtype="float32", images_per_call=1)
    stock: Any = recipe.make()
    result = placed(**arguments).prediction
    arguments["generator"] = [torch.Generator().manual_seed(3)]
    expected = stock(**arguments).prediction
    assert result.shape == expected.shape
    assert abs(result - expected).max() < 1e-4


def compute_gradients() -> list[Any]:
    gradients = []
    for pipe in (make(Stock), anyaccel.place(make(Stock), "cpu", dtype="float32")):
        for model in (pipe.text_encoder, pipe.vae):
            model.requires_grad_(False)
        call = type(pipe).__call__.__wrapped__
        arguments = {"num_inference_steps": 1, "output_type": "latent", "return_dict": False}
        latents = call(pipe, "a fox", generator=torch.Generator().manual_seed(1), **arguments)[0]
        latents.sum().backward()
        gradients.append(pipe.unet.conv_out.weight.grad.numpy())
    return gradients


def test_gradients_through_the_undecorated_call() -> None:
    expected, actual = call_in_fork(compute_gradients, name="gradients", timeout_s=120)
    assert (expected == actual).all()
    assert abs(expected).max() > 0
