"""Recipes for tiny Stable Diffusion 1 and 2 pipelines: text-to-image, image-to-image and inpainting."""

from __future__ import annotations

from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import make_image, mask, prompted
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, clip_text
from anyaccel.recipes.parts.tokenizers import clip_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES", "denoiser", "parts", "scheduler"]

SIZE = 16


def denoiser(**more: Any) -> Any:
    """Return a tiny Stable Diffusion UNet with two levels; the lower level has cross-attention."""
    return diffusers.UNet2DConditionModel(
        **{
            "sample_size": SIZE // 2,
            "in_channels": 4,
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": TEXT_WIDTH,
            "attention_head_dim": 2,
            "norm_num_groups": 4,
        }
        | more
    )


def scheduler(**more: Any) -> dict[str, Any]:
    """Return scheduler arguments for the noise schedule with which Stable Diffusion was trained."""
    return {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1} | more


def parts(**more: Any) -> dict[str, Any]:
    """Return the components of a tiny Stable Diffusion 1.5 pipeline, without the safety checker."""
    return {
        "vae": autoencoder_kl(),
        "text_encoder": clip_text(),
        "tokenizer": clip_tokenizer(),
        "unet": denoiser(),
        "scheduler": diffusers.PNDMScheduler(**scheduler(skip_prk_steps=True)),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    } | more


def parts_of_version_2() -> dict[str, Any]:
    """Return the components of a tiny Stable Diffusion 2 pipeline.

    It uses v-prediction and linear projections, and its number of attention heads differs per level.
    """
    return parts(
        text_encoder=clip_text(hidden_act="gelu"),
        tokenizer=clip_tokenizer(pad_token="!"),
        unet=denoiser(attention_head_dim=(2, 4), use_linear_projection=True),
        scheduler=diffusers.DDIMScheduler(**scheduler(prediction_type="v_prediction", clip_sample=False)),
    )


def parts_for_inpainting() -> dict[str, Any]:
    """Return the components of a tiny Stable Diffusion inpainting pipeline.

    The UNet also receives the mask and the latents of the masked image.
    """
    return parts(unet=denoiser(in_channels=9))


RECIPES = (
    make_recipe(
        name="stable-diffusion",
        pipeline="StableDiffusionPipeline",
        family="stable-diffusion",
        parts=parts,
        call=lambda: prompted(height=SIZE, width=SIZE),
    ),
    make_recipe(
        name="stable-diffusion-2",
        pipeline="StableDiffusionPipeline",
        family="stable-diffusion",
        parts=parts_of_version_2,
        call=lambda: prompted(height=SIZE, width=SIZE),
    ),
    make_recipe(
        name="stable-diffusion-image-to-image",
        pipeline="StableDiffusionImg2ImgPipeline",
        family="stable-diffusion",
        parts=parts,
        call=lambda: prompted(image=make_image(SIZE), strength=0.5, num_inference_steps=4),
    ),
    make_recipe(
        name="stable-diffusion-inpaint",
        pipeline="StableDiffusionInpaintPipeline",
        family="stable-diffusion",
        parts=parts_for_inpainting,
        call=lambda: prompted(image=make_image(SIZE), mask_image=mask(SIZE), height=SIZE, width=SIZE),
    ),
)
