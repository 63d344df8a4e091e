"""Recipes for tiny Stable Diffusion pipelines with T2I-Adapter, IP-Adapter or ControlNet-XS."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families import stable_diffusion, stable_diffusion_xl
from anyaccel.recipes.lazy_modules import diffusers, torch
from anyaccel.recipes.parts.calls import embedding, make_image, prompted
from anyaccel.recipes.parts.image_encoders import IMAGE_WIDTH, clip_image_processor, clip_vision
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16
# The block order of Stable Diffusion: adapter features are added before the downsampler of a level.
ATTENTION_FIRST: dict[str, Any] = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}

recipe = functools.partial(make_recipe, family="adapter")


def t2i_adapter() -> Any:
    """Return a tiny T2I-Adapter with one feature map per UNet level."""
    return diffusers.T2IAdapter(channels=[8, 16], num_res_blocks=1, downscale_factor=2)


def parts_with_controlnet_xs(base: Any, **more: Any) -> dict[str, Any]:
    """Return the components of a tiny pipeline with a ControlNet-XS that is half as wide as the UNet.

    `base` is the recipe module for Stable Diffusion or SDXL.
    """
    parts: dict[str, Any] = base.parts(unet=base.denoiser(layers_per_block=2, **ATTENTION_FIRST, **more))
    parts["controlnet"] = diffusers.ControlNetXSAdapter.from_unet(
        parts["unet"], size_ratio=0.5, conditioning_embedding_out_channels=(8, 16)
    )
    return parts


def parts_for_ip_adapter() -> dict[str, Any]:
    """Return the components of a tiny Stable Diffusion pipeline with an image encoder for IP-Adapter."""
    return stable_diffusion.parts(image_encoder=clip_vision(), feature_extractor=clip_image_processor())


def add_ip_adapter(pipe: Any) -> None:
    """Load an IP-Adapter with four image tokens into the pipeline.

    Its weights are zero at first and are randomized later, with those of the other models.
    """
    widths = {
        name: processor_width(pipe.unet, name) for name in pipe.unet.attn_processors if name.endswith("attn2.processor")
    }
    # Layers in an IP-Adapter file are numbered like the processors, and every second processor is cross attention.
    attention = {
        f"{2 * index + 1}.to_{kind}_ip.weight": torch.zeros(width, pipe.unet.config.cross_attention_dim)
        for index, width in enumerate(widths.values())
        for kind in ("k", "v")
    }
    tokens = 4 * TEXT_WIDTH
    projection = {
        "proj.weight": torch.zeros(tokens, IMAGE_WIDTH),
        "proj.bias": torch.zeros(tokens),
        "norm.weight": torch.zeros(TEXT_WIDTH),
        "norm.bias": torch.zeros(TEXT_WIDTH),
    }
    pipe.load_ip_adapter(
        {"image_proj": projection, "ip_adapter": attention}, subfolder="", weight_name="", image_encoder_folder=None
    )
    pipe.set_ip_adapter_scale(0.7)


def processor_width(denoiser: Any, name: str) -> int:
    """Return the width of the attention layer that uses the named attention processor."""
    return int(denoiser.get_submodule(name.removesuffix(".processor")).to_q.out_features)


RECIPES = (
    recipe(
        name="t2i-adapter",
        pipeline="StableDiffusionAdapterPipeline",
        parts=lambda: stable_diffusion.parts(unet=stable_diffusion.denoiser(**ATTENTION_FIRST), adapter=t2i_adapter()),
        call=lambda: prompted(image=make_image(SIZE), height=SIZE, width=SIZE),
    ),
    recipe(
        name="ip-adapter",
        pipeline="StableDiffusionPipeline",
        parts=parts_for_ip_adapter,
        finish=add_ip_adapter,
        call=lambda: prompted(ip_adapter_image_embeds=[embedding(2, 1, IMAGE_WIDTH)], height=SIZE, width=SIZE),
    ),
    recipe(
        name="ip-adapter-from-image",
        pipeline="StableDiffusionPipeline",
        parts=parts_for_ip_adapter,
        finish=add_ip_adapter,
        call=lambda: prompted(ip_adapter_image=make_image(SIZE), height=SIZE, width=SIZE),
    ),
    recipe(
        name="controlnet-xs",
        pipeline="StableDiffusionControlNetXSPipeline",
        parts=lambda: parts_with_controlnet_xs(stable_diffusion, use_linear_projection=True),
        call=lambda: prompted(image=make_image(SIZE), height=SIZE, width=SIZE),
    ),
    recipe(
        name="controlnet-xs-xl",
        pipeline="StableDiffusionXLControlNetXSPipeline",
        parts=lambda: parts_with_controlnet_xs(stable_diffusion_xl),
        call=lambda: prompted(image=make_image(SIZE), height=SIZE, width=SIZE),
    ),
    recipe(
        name="t2i-adapter-xl",
        pipeline="StableDiffusionXLAdapterPipeline",
        parts=lambda: {
            name: part
            for name, part in stable_diffusion_xl.parts(
                unet=stable_diffusion_xl.denoiser(**ATTENTION_FIRST), adapter=t2i_adapter()
            ).items()
            if name != "add_watermarker"
        },
        call=lambda: prompted(image=make_image(SIZE), height=SIZE, width=SIZE),
    ),
)
