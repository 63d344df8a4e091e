"""Recipes for tiny Stable Diffusion 3 pipelines.

They cover text-to-image, image-to-image, inpainting and ControlNet.
"""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import make_image, mask, prompted
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, clip_text_with_projection, t5_encoder
from anyaccel.recipes.parts.tokenizers import clip_tokenizer, t5_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES", "parts"]

SIZE = 16
CHANNELS = 16  # inpainting accepts no other number
LETTERS = 32

recipe = functools.partial(make_recipe, family="stable-diffusion-3")


def transformer_shape(**more: Any) -> dict[str, Any]:
    """Return the constructor arguments shared by the transformer and its ControlNet.

    The context is as wide as the two CLIP embeddings combined.
    """
    return {
        "sample_size": SIZE // 2,
        "patch_size": 2,
        "in_channels": CHANNELS,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "joint_attention_dim": 2 * TEXT_WIDTH,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 2 * TEXT_WIDTH,
        "out_channels": CHANNELS,
        "pos_embed_max_size": SIZE // 2,
        "qk_norm": "rms_norm",
        "dual_attention_layers": (0,),
    } | more


def parts(**more: Any) -> dict[str, Any]:
    """Return the components of a tiny Stable Diffusion 3.5 Medium pipeline.

    It has three text encoders, and dual attention in the first transformer layer.
    """
    return {
        "transformer": diffusers.SD3Transformer2DModel(**transformer_shape()),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        "vae": autoencoder_kl(
            latent_channels=CHANNELS,
            scaling_factor=1.5305,
            shift_factor=0.0609,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        "text_encoder": clip_text_with_projection(),
        "tokenizer": clip_tokenizer(),
        "text_encoder_2": clip_text_with_projection(hidden_act="gelu"),
        "tokenizer_2": clip_tokenizer(pad_token="!"),
        "text_encoder_3": t5_encoder(d_model=2 * TEXT_WIDTH),
        "tokenizer_3": t5_tokenizer(),
    } | more


def parts_with_controlnet(**more: Any) -> dict[str, Any]:
    """Return the components of a tiny Stable Diffusion 3 pipeline with a ControlNet."""
    return parts(controlnet=diffusers.SD3ControlNetModel(**transformer_shape(**more)))


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for a 16x16 image, with at most 32 prompt tokens."""
    return prompted(height=SIZE, width=SIZE, max_sequence_length=LETTERS) | more


RECIPES = (
    recipe(name="stable-diffusion-3", pipeline="StableDiffusion3Pipeline", parts=parts, call=call),
    recipe(
        name="stable-diffusion-3-image-to-image",
        pipeline="StableDiffusion3Img2ImgPipeline",
        parts=parts,
        call=lambda: call(image=make_image(SIZE), strength=0.5, num_inference_steps=4),
    ),
    recipe(
        name="stable-diffusion-3-inpaint",
        pipeline="StableDiffusion3InpaintPipeline",
        parts=parts,
        call=lambda: call(image=make_image(SIZE), mask_image=mask(SIZE), strength=0.5, num_inference_steps=4),
    ),
    recipe(
        name="stable-diffusion-3-controlnet",
        pipeline="StableDiffusion3ControlNetPipeline",
        parts=parts_with_controlnet,
        call=lambda: call(control_image=make_image(SIZE)),
    ),
    recipe(
        name="stable-diffusion-3-controlnet-inpaint",
        pipeline="StableDiffusion3ControlNetInpaintingPipeline",
        parts=lambda: parts_with_controlnet(extra_conditioning_channels=1),
        call=lambda: call(control_image=make_image(SIZE), control_mask=mask(SIZE)),
    ),
)
