"""Recipes for tiny DeepFloyd IF pipelines.

The first stage generates an image in pixel space, and the second stage increases its resolution.
"""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, mask, prompted
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, t5_encoder
from anyaccel.recipes.parts.tokenizers import t5_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16

recipe = functools.partial(make_recipe, family="deep-floyd")


def denoiser(**more: Any) -> Any:
    """Return a tiny DeepFloyd IF UNet, which predicts the noise and its variance."""
    return diffusers.UNet2DConditionModel(
        **{
            "sample_size": SIZE,
            "in_channels": 3,
            "out_channels": 6,
            "layers_per_block": 1,
            "block_out_channels": (16, 32),
            "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
            "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
            "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
            "cross_attention_dim": 32,  # its norm has 32 groups
            "encoder_hid_dim": TEXT_WIDTH,
            "attention_head_dim": 4,
            "addition_embed_type": "text",
            "addition_embed_type_num_heads": 2,
            "cross_attention_norm": "group_norm",
            "resnet_time_scale_shift": "scale_shift",
            "act_fn": "gelu",
            "norm_num_groups": 4,
        }
        | more
    )


def parts(**more: Any) -> dict[str, Any]:
    """Return the components of a tiny first-stage pipeline, without safety checker or watermarker."""
    return {
        "tokenizer": t5_tokenizer(),
        "text_encoder": t5_encoder(),
        "unet": denoiser(),
        "scheduler": diffusers.DDPMScheduler(
            beta_schedule="squaredcos_cap_v2", thresholding=True, sample_max_value=1.0, variance_type="learned_range"
        ),
        "safety_checker": None,
        "feature_extractor": None,
        "watermarker": None,
        "requires_safety_checker": False,
    } | more


def parts_of_second_stage() -> dict[str, Any]:
    """Return the components of a tiny second-stage pipeline, which performs super-resolution.

    The UNet also receives the low-resolution image and its noise level.
    """
    return parts(
        unet=denoiser(in_channels=6, class_embed_type="timestep"),
        image_noising_scheduler=diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2"),
    )


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments with caption cleaning disabled."""
    return prompted(clean_caption=False, **more)


def call_halfway(**more: Any) -> dict[str, Any]:
    """Return call arguments for image-to-image at strength 0.5, which runs the last two of four steps."""
    return call(strength=0.5, **more) | {"num_inference_steps": 4}


RECIPES = (
    recipe(
        name="deep-floyd",
        pipeline="IFPipeline",
        parts=parts,
        call=lambda: call(height=SIZE, width=SIZE),
    ),
    recipe(
        name="deep-floyd-image-to-image",
        pipeline="IFImg2ImgPipeline",
        parts=parts,
        call=lambda: call_halfway(image=make_image(SIZE)),
    ),
    recipe(
        name="deep-floyd-inpaint",
        pipeline="IFInpaintingPipeline",
        parts=parts,
        call=lambda: call_halfway(image=make_image(SIZE), mask_image=mask(SIZE)),
    ),
    recipe(
        name="deep-floyd-super-resolution",
        pipeline="IFSuperResolutionPipeline",
        parts=parts_of_second_stage,
        call=lambda: call(image=make_image(SIZE // 2), height=SIZE, width=SIZE),
    ),
    recipe(
        name="deep-floyd-super-resolution-image-to-image",
        pipeline="IFImg2ImgSuperResolutionPipeline",
        parts=parts_of_second_stage,
        call=lambda: call_halfway(image=make_image(SIZE // 2), original_image=make_image(SIZE)),
    ),
    recipe(
        name="deep-floyd-super-resolution-inpaint",
        pipeline="IFInpaintingSuperResolutionPipeline",
        parts=parts_of_second_stage,
        call=lambda: call_halfway(
            image=make_image(SIZE // 2), original_image=make_image(SIZE), mask_image=mask(SIZE), noise_level=20
        ),
    ),
)
