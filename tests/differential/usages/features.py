"""Usages of optional features of diffusers, and of replaced components."""

from __future__ import annotations

import copy
from typing import Any

import diffusers
import torch

from tests.differential.session import Session, twice, usage

GROUP = "features of diffusers"


@usage(GROUP)
def attention_processor_replaced(session: Session) -> Any:
    """`unet.set_attn_processor` with a processor of the user."""

    class Processor(diffusers.models.attention_processor.AttnProcessor):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs) * 0.9

    return twice(session, lambda pipe: pipe.unet.set_attn_processor(Processor()))


@usage(GROUP, tolerance=1e-5)  # anyaccel slices attention in its own order
def attention_sliced(session: Session) -> Any:
    """`enable_attention_slicing` and `disable_attention_slicing`."""
    pipe = session.make()
    pipe.enable_attention_slicing()
    sliced = session.run(pipe)
    pipe.disable_attention_slicing()
    return {"sliced": sliced, "whole": session.run(pipe)}


@usage(GROUP)
def vae_sliced_and_tiled(session: Session) -> Any:
    """`vae.enable_slicing` and `vae.enable_tiling`."""

    def edit(pipe: Any) -> None:
        pipe.vae.enable_slicing()
        pipe.vae.enable_tiling()

    return twice(session, edit, num_images_per_prompt=2)


@usage(GROUP)
def freeu(session: Session) -> Any:
    """`enable_freeu` and `disable_freeu`."""
    pipe = session.make()
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    enabled = session.run(pipe)
    pipe.disable_freeu()
    return {"enabled": enabled, "disabled": session.run(pipe)}


@usage(GROUP)
def qkv_projections_fused(session: Session) -> Any:
    """`fuse_qkv_projections` and `unfuse_qkv_projections`."""
    pipe = session.make()
    with torch.random.fork_rng():  # new layers draw their weights on the device, then copy
        pipe.fuse_qkv_projections()
    fused = session.run(pipe)
    pipe.unfuse_qkv_projections()
    return {"fused": fused, "unfused": session.run(pipe)}


@usage(GROUP)
def module_replaced(session: Session) -> Any:
    """`pipe.unet.conv_in = …`: a layer replaced by the user's own."""

    def edit(pipe: Any) -> None:
        old = pipe.unet.conv_in
        new = torch.nn.Conv2d(old.in_channels, old.out_channels, 3, padding=1)
        new.load_state_dict({name: value * 1.2 for name, value in old.state_dict().items()})
        pipe.unet.conv_in = new.to(old.weight.device)

    return twice(session, edit)


@usage(GROUP)
def component_replaced(session: Session) -> Any:
    """`pipe.unet = other`: a whole model replaced, on the CPU as loaded."""

    def edit(pipe: Any) -> None:
        other = session.make(place=False).unet
        with torch.no_grad():
            other.conv_in.weight.mul_(1.2)
        pipe.unet = other.to(pipe.device)

    return twice(session, edit)


@usage(GROUP)
def component_registered(session: Session) -> Any:
    """`pipe.register_modules(unet=…)`."""

    def edit(pipe: Any) -> None:
        other = copy.deepcopy(session.make(place=False).unet)
        with torch.no_grad():
            other.conv_in.weight.mul_(1.2)
        pipe.register_modules(unet=other.to(pipe.device))

    return twice(session, edit)


@usage(GROUP)
def tokenizer_changed(session: Session) -> Any:
    """`tokenizer.model_max_length` changed between calls."""
    pipe = session.make()
    first = session.run(pipe, prompt="red fox")
    pipe.tokenizer.model_max_length = 5
    return {"before": first, "after": session.run(pipe, prompt="red fox")}


@usage(GROUP, skip={"served": "the module keeps the tensor of another request"})
def module_returns_its_own_tensor(session: Session) -> Any:
    """A replaced layer that returns a tensor it keeps; later layers do not overwrite it."""

    class Remembering(torch.nn.Module):
        def __init__(self, layer: torch.nn.Module) -> None:
            super().__init__()
            self.layer = layer
            self.kept: torch.Tensor | None = None

        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self.kept is None:
                self.kept = self.layer(*args, **kwargs)
            return self.kept

    def edit(pipe: Any) -> None:
        block = pipe.unet.down_blocks[0].resnets[0]
        block.conv1, block.conv2 = Remembering(block.conv1), Remembering(block.conv2)

    return twice(session, edit)


@usage(GROUP)
def text_encoder_config_changed(session: Session) -> Any:
    """An edit of the text encoder's activation function and config between calls."""

    def edit(pipe: Any) -> None:
        pipe.text_encoder.config.eos_token_id = 1
        for module in pipe.text_encoder.modules():
            if hasattr(module, "activation_fn"):
                module.activation_fn = torch.nn.ReLU()

    return twice(session, edit)


@usage(GROUP)
def model_called_after_an_edit(session: Session) -> Any:
    """`weight.data` edits between direct calls of the UNet and the VAE."""
    pipe = session.make()
    session.run(pipe)
    source = torch.Generator().manual_seed(2)
    latents = torch.randn(1, 4, 8, 8, generator=source).to(pipe.device)
    states = torch.randn(1, 7, pipe.text_encoder.config.hidden_size, generator=source).to(pipe.device)
    values = {}
    for factor in (1.0, 1.5):
        pipe.unet.conv_in.weight.data = pipe.unet.conv_in.weight.data * factor
        pipe.vae.decoder.conv_in.weight.data.mul_(factor)
        with torch.no_grad():
            values[f"unet {factor}"] = pipe.unet(latents, 10, encoder_hidden_states=states).sample
            values[f"vae {factor}"] = pipe.vae.decode(latents).sample
    return values


@usage(GROUP)
def shared_components_edited(session: Session) -> Any:
    """`weight.data` edits of components that a placed and a plain pipeline share."""
    pipe = session.make()
    first = session.run(pipe)
    pipe.unet.conv_in.weight.data.mul_(1.5)
    other = diffusers.StableDiffusionPipeline(**pipe.components, requires_safety_checker=False)
    other.set_progress_bar_config(disable=True)
    return {"before": first, "other": session.run(other), "after": session.run(pipe)}
