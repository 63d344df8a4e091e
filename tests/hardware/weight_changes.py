"""Changes of weights and adapters, and of the arguments of a call."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import diffusers
import torch

from tests.hardware.invalidation_cases import arguments_changed, case, find_attention, generate_again

# Weights


@case(compile=True)
def weight_multiplied_in_place(pipe: Any) -> Iterator[None]:
    weight = pipe.unet.conv_in.weight
    with torch.no_grad():
        weight.mul_(1.5)
    yield
    with torch.no_grad():
        weight.div_(1.5)


@case()
def weight_copied_in_place(pipe: Any) -> Iterator[None]:
    weight = pipe.unet.conv_out.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(before * 0.5)
    yield
    with torch.no_grad():
        weight.copy_(before)


@case()
def weight_data_multiplied(pipe: Any) -> Iterator[None]:
    weight = pipe.unet.conv_in.weight
    weight.data.mul_(1.5)
    yield
    weight.data.div_(1.5)


@case()
def weight_data_replaced(pipe: Any) -> Iterator[None]:
    weight = pipe.unet.conv_in.weight
    before = weight.data
    weight.data = before * 1.5
    yield
    weight.data = before


@case(compile=True)
def parameter_replaced(pipe: Any) -> Iterator[None]:
    layer = pipe.unet.conv_in
    before = layer.weight
    layer.weight = torch.nn.Parameter(before.detach() * 1.5)
    yield
    layer.weight = before


@case()
def parameters_swapped(pipe: Any) -> Iterator[None]:
    layer = pipe.unet.conv_in
    other = torch.nn.Parameter(layer.weight.detach() * 1.5)
    torch.utils.swap_tensors(layer.weight, other)
    yield
    torch.utils.swap_tensors(layer.weight, other)


@case()
def parameter_shared_with_another_layer(pipe: Any) -> Iterator[None]:
    attention = find_attention(pipe.unet)
    before = attention.to_v.weight
    attention.to_v.weight = attention.to_k.weight
    yield
    attention.to_v.weight = before


@case()
def model_edited_on_the_cpu(pipe: Any) -> Iterator[None]:
    device = next(pipe.unet.parameters()).device
    pipe.unet.to("cpu")
    pipe.unet.conv_in.weight.data.mul_(1.5)
    pipe.unet.to(device)
    yield
    pipe.unet.conv_in.weight.data.div_(1.5)


@case()
def state_dict_loaded(pipe: Any) -> Iterator[None]:
    before = {name: value.clone() for name, value in pipe.unet.state_dict().items()}
    pipe.unet.load_state_dict({name: value * 1.1 for name, value in before.items()})
    yield
    pipe.unet.load_state_dict(before)


@case()
def state_dict_assigned(pipe: Any) -> Iterator[None]:
    before = dict(pipe.unet.state_dict())
    pipe.unet.load_state_dict({name: value * 1.1 for name, value in before.items()}, assign=True)
    yield
    pipe.unet.load_state_dict(before, assign=True)


@case(recipe="stable-diffusion-3")
def buffer_edited_in_place(pipe: Any) -> Iterator[None]:
    buffer = pipe.transformer.pos_embed.pos_embed
    buffer.mul_(2)
    yield
    buffer.div_(2)


@case(recipe="stable-diffusion-3")
def buffer_replaced(pipe: Any) -> Iterator[None]:
    layer = pipe.transformer.pos_embed
    before = layer.pos_embed
    layer.pos_embed = before * 2
    yield
    layer.pos_embed = before


@case()
def channels_last_weights(pipe: Any) -> Iterator[None]:
    pipe.unet.to(memory_format=torch.channels_last)
    pipe.unet.conv_in.weight.data.mul_(1.5)
    yield
    pipe.unet.conv_in.weight.data.div_(1.5)
    pipe.unet.to(memory_format=torch.contiguous_format)


@case(compile=True)
def decoder_weight_edited(pipe: Any) -> Iterator[None]:
    weight = pipe.vae.decoder.conv_in.weight
    before = weight.data
    weight.data = before * 0.5
    yield
    weight.data = before


@case(recipe="flux", compile=True)
def transformer_weight_replaced(pipe: Any) -> Iterator[None]:
    weight = pipe.transformer.proj_out.weight
    before = weight.data
    weight.data = before * 1.5
    yield
    weight.data = before


# Adapters


def make_lora(model: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the weights of a LoRA for the query projections of a UNet."""
    generator, weights = torch.Generator().manual_seed(seed), {}
    for name, layer in model.named_modules():
        if name.endswith(("to_q", "to_q.base_layer")):
            key = f"unet.{name.removesuffix('.base_layer')}"
            weights[f"{key}.lora_A.weight"] = torch.randn(2, layer.in_features, generator=generator)
            weights[f"{key}.lora_B.weight"] = torch.randn(layer.out_features, 2, generator=generator)
    return weights


@case(compile=True)
def lora_loaded(pipe: Any) -> Iterator[None]:
    pipe.load_lora_weights(make_lora(pipe.unet), adapter_name="style")
    yield
    pipe.unload_lora_weights()


@case()
def lora_scale_set(pipe: Any) -> Iterator[None]:
    pipe.load_lora_weights(make_lora(pipe.unet), adapter_name="style")
    generate_again(pipe)
    pipe.set_adapters("style", 0.4)
    yield
    pipe.unload_lora_weights()


@case()
def second_lora_mixed_in(pipe: Any) -> Iterator[None]:
    pipe.load_lora_weights(make_lora(pipe.unet), adapter_name="style")
    generate_again(pipe)
    pipe.load_lora_weights(make_lora(pipe.unet, seed=1), adapter_name="other")
    pipe.set_adapters(["style", "other"], [0.5, 0.7])
    yield
    pipe.unload_lora_weights()


@case()
def lora_fused(pipe: Any) -> Iterator[None]:
    pipe.load_lora_weights(make_lora(pipe.unet), adapter_name="style")
    generate_again(pipe)
    pipe.fuse_lora(lora_scale=0.5)
    yield
    pipe.unfuse_lora()
    pipe.unload_lora_weights()


@case(visible=False)
def lora_disabled(pipe: Any) -> Iterator[None]:
    pipe.load_lora_weights(make_lora(pipe.unet), adapter_name="style")
    generate_again(pipe)
    pipe.disable_lora()
    yield
    pipe.unload_lora_weights()


@case()
def lora_scale_of_one_call(pipe: Any) -> Iterator[None]:
    pipe.load_lora_weights(make_lora(pipe.unet), adapter_name="style")
    generate_again(pipe)
    with arguments_changed(pipe, cross_attention_kwargs={"scale": 0.3}):
        yield
    pipe.unload_lora_weights()


@case(recipe="ip-adapter")
def ip_adapter_scale_set(pipe: Any) -> Iterator[None]:
    pipe.set_ip_adapter_scale(0.1)
    yield
    pipe.set_ip_adapter_scale(0.7)


# Arguments of the call


@case()
def new_size(pipe: Any) -> Iterator[None]:
    with arguments_changed(pipe, height=32, width=16):
        yield


@case()
def new_batch(pipe: Any) -> Iterator[None]:
    with arguments_changed(pipe, num_images_per_prompt=2):
        yield


@case()
def no_guidance(pipe: Any) -> Iterator[None]:
    with arguments_changed(pipe, guidance_scale=1.0):
        yield


@case()
def new_prompt(pipe: Any) -> Iterator[None]:
    with arguments_changed(pipe, prompt="a blue whale in the sea"):
        yield


@case()
def scheduler_replaced(pipe: Any) -> Iterator[None]:
    before = pipe.scheduler
    pipe.scheduler = diffusers.EulerDiscreteScheduler.from_config(before.config)
    yield
    pipe.scheduler = before


@case(call={"num_inference_steps": 4})
def weight_edited_by_a_callback(pipe: Any) -> Iterator[None]:
    weight = pipe.unet.conv_out.weight
    before = weight.data

    def edit(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        weight.data = before * (1.5 if step == 0 else 1.0)  # the last step undoes the change
        return {}

    with arguments_changed(pipe, callback_on_step_end=edit):
        yield
    weight.data = before


@case()
def layerwise_casting(pipe: Any) -> Iterator[None]:
    before = pipe.unet
    pipe.unet = copy.deepcopy(before)
    pipe.unet.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32)
    pipe.unet.conv_in.weight.data.mul_(1.5)
    yield
    pipe.unet = before
