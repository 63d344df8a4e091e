"""Changes of hooks, layers, attributes, configs and attention processors."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import diffusers
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers.hooks import FirstBlockCacheConfig
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from torch.nn.utils import parametrizations, parametrize

from tests.hardware.invalidation_cases import case, find_attention, generate_again

# Hooks


def double_output(module: Any, args: Any, output: Any) -> Any:
    return output * 1.5 if isinstance(output, torch.Tensor) else None


def double_input(module: Any, args: Any) -> Any:
    return (args[0] * 1.5, *args[1:]) if args and isinstance(args[0], torch.Tensor) else None


@case(compile=True)
def hook_on_a_layer(pipe: Any) -> Iterator[None]:
    handle = pipe.unet.mid_block.resnets[0].conv1.register_forward_hook(double_output)
    yield
    handle.remove()


@case()
def pre_hook_on_a_layer(pipe: Any) -> Iterator[None]:
    handle = pipe.unet.conv_out.register_forward_pre_hook(double_input)
    yield
    handle.remove()


@case()
def hook_with_arguments_on_a_layer(pipe: Any) -> Iterator[None]:
    def change(module: Any, args: Any, kwargs: Any) -> Any:
        return (args[0] * 1.5, *args[1:]), kwargs

    handle = pipe.unet.conv_out.register_forward_pre_hook(change, with_kwargs=True)
    yield
    handle.remove()


@case()
def hook_on_the_model(pipe: Any) -> Iterator[None]:
    def change(module: Any, args: Any, output: Any) -> Any:
        return (output[0] * 1.5,)

    handle = pipe.unet.register_forward_hook(change)
    yield
    handle.remove()


@case()
def pre_hook_on_the_model(pipe: Any) -> Iterator[None]:
    handle = pipe.unet.register_forward_pre_hook(double_input)
    yield
    handle.remove()


@case()
def global_hook(pipe: Any) -> Iterator[None]:
    def change(module: Any, args: Any, output: Any) -> Any:
        return output * 1.5 if isinstance(module, torch.nn.Conv2d) else None

    handle = torch.nn.modules.module.register_module_forward_hook(change)
    yield
    handle.remove()


@case()
def global_pre_hook(pipe: Any) -> Iterator[None]:
    def change(module: Any, args: Any) -> Any:
        return (args[0] * 1.5, *args[1:]) if isinstance(module, torch.nn.Conv2d) else None

    handle = torch.nn.modules.module.register_module_forward_pre_hook(change)
    yield
    handle.remove()


class ScaleInput(ModelHook):
    """A hook of accelerate that multiplies the first argument."""

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return (args[0] * 1.5, *args[1:]), kwargs


@case()
def accelerate_hook_on_a_layer(pipe: Any) -> Iterator[None]:
    add_hook_to_module(pipe.unet.conv_out, ScaleInput())
    yield
    remove_hook_from_module(pipe.unet.conv_out)


@case(recipe="flux", call={"num_inference_steps": 4})
def cache_of_diffusers(pipe: Any) -> Iterator[None]:
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=1e6))
    yield
    pipe.transformer.disable_cache()


# Modules, attributes and configs


@case()
def layer_replaced(pipe: Any) -> Iterator[None]:
    before = pipe.unet.conv_out
    pipe.unet.conv_out = copy.deepcopy(before)
    pipe.unet.conv_out.weight.data.mul_(1.5)
    yield
    pipe.unet.conv_out = before


@case()
def layer_of_a_list_replaced(pipe: Any) -> Iterator[None]:
    blocks = pipe.unet.mid_block.resnets
    before = blocks[0]
    blocks[0] = copy.deepcopy(before)
    blocks[0].conv1.weight.data.mul_(1.5)
    yield
    blocks[0] = before


@case()
def denoiser_replaced_by_a_copy(pipe: Any) -> Iterator[None]:
    before = pipe.unet
    pipe.unet = copy.deepcopy(before)
    pipe.unet.conv_in.weight.data.mul_(1.5)
    yield
    pipe.unet = before


@case(compile=True)
def attribute_of_a_layer(pipe: Any) -> Iterator[None]:
    layer = pipe.unet.mid_block.resnets[0]
    before, layer.output_scale_factor = layer.output_scale_factor, 2.0
    yield
    layer.output_scale_factor = before


@case()
def epsilon_of_a_norm(pipe: Any) -> Iterator[None]:
    norm = pipe.unet.conv_norm_out
    before, norm.eps = norm.eps, 0.5
    yield
    norm.eps = before


@case()
def config_of_the_model(pipe: Any) -> Iterator[None]:
    pipe.unet.register_to_config(center_input_sample=True)
    yield
    pipe.unet.register_to_config(center_input_sample=False)


@case()
def forward_of_a_layer(pipe: Any) -> Iterator[None]:
    layer = pipe.unet.conv_out
    plain = layer.forward
    layer.forward = lambda sample: plain(sample) * 1.5
    yield
    del layer.forward


@case()
def class_of_a_layer(pipe: Any) -> Iterator[None]:
    layer = pipe.unet.conv_out
    plain = type(layer)

    class Scaled(plain):  # type: ignore[valid-type,misc]
        def forward(self, sample: Any) -> Any:
            return super().forward(sample) * 1.5

    layer.__class__ = Scaled
    yield
    layer.__class__ = plain


class ScaledProcessor(AttnProcessor2_0):
    """A user's attention processor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.scale = 1.5

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * self.scale


@case(compile=True)
def attention_processor_replaced(pipe: Any) -> Iterator[None]:
    before = pipe.unet.attn_processors
    pipe.unet.set_attn_processor(ScaledProcessor())
    yield
    pipe.unet.set_attn_processor(before)


@case()
def attribute_of_a_processor(pipe: Any) -> Iterator[None]:
    before = pipe.unet.attn_processors
    processor = ScaledProcessor()
    pipe.unet.set_attn_processor(processor)
    generate_again(pipe)
    processor.scale = 0.5
    yield
    pipe.unet.set_attn_processor(before)


@case()
def scale_of_an_attention_layer(pipe: Any) -> Iterator[None]:
    before = pipe.unet.attn_processors
    pipe.unet.set_attn_processor(AttnProcessor())  # type: ignore[no-untyped-call]
    generate_again(pipe)
    attention = find_attention(pipe.unet)
    scale, attention.scale = attention.scale, 3.0
    yield
    attention.scale = scale
    pipe.unet.set_attn_processor(before)


@case(recipe="flux", visible=False, drops=True)
def attention_backend_set(pipe: Any) -> Iterator[None]:
    with diffusers.attention_backend("native"):  # restored at the end: set_attention_backend also sets it globally
        pipe.transformer.set_attention_backend("_native_math")
        yield
        pipe.transformer.reset_attention_backend()


@case(recipe="flux", visible=False, drops=True)
def attention_backend_context(pipe: Any) -> Iterator[None]:
    with diffusers.attention_backend("_native_math"):
        yield


@case()
def freeu_enabled(pipe: Any) -> Iterator[None]:
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    yield
    pipe.disable_freeu()


@case()
def freeu_with_a_patched_helper(pipe: Any) -> Iterator[None]:
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    generate_again(pipe)
    plain = diffusers.utils.torch_utils.fourier_filter

    @functools.wraps(plain)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs) * 1.5

    with mock.patch("diffusers.utils.torch_utils.fourier_filter", patched):
        yield
    pipe.disable_freeu()


@case(recipe="stable-diffusion-xl")
def projections_fused(pipe: Any) -> Iterator[None]:
    pipe.fuse_qkv_projections(vae=False)
    generate_again(pipe)
    weight = next(layer for name, layer in pipe.unet.named_modules() if name.endswith("attn1.to_qkv")).weight
    before = weight.data
    weight.data = before * 1.5
    yield
    weight.data = before
    pipe.unfuse_qkv_projections(vae=False)


@case()
def weight_norm_added(pipe: Any) -> Iterator[None]:
    layer = pipe.unet.conv_out
    before = layer.weight.detach().clone()
    parametrizations.weight_norm(layer)
    generate_again(pipe)
    layer.parametrizations.weight.original0.data.mul_(1.5)
    yield
    parametrize.remove_parametrizations(layer, "weight")
    layer.weight.data.copy_(before)


class Half(torch.nn.Module):
    def forward(self, weight: Any) -> Any:
        return weight * 0.5


@case()
def parametrization_added(pipe: Any) -> Iterator[None]:
    parametrize.register_parametrization(pipe.unet.conv_out, "weight", Half())
    yield
    parametrize.remove_parametrizations(pipe.unet.conv_out, "weight", leave_parametrized=False)


@case()
def training_mode_with_dropout(pipe: Any) -> Iterator[None]:
    with dropout(pipe.unet, pipe.unet.modules()):
        yield


@case()
def dropout_in_one_layer(pipe: Any) -> Iterator[None]:
    with dropout(pipe.unet, [pipe.unet.mid_block.resnets[0].dropout]):
        yield


@contextmanager
def dropout(model: Any, layers: Any) -> Iterator[None]:
    """Enable dropout in some layers."""
    for layer in layers:
        layer.training = True
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.5
    yield
    for layer in model.eval().modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
