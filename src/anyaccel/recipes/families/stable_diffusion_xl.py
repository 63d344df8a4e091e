"""Recipes for tiny SDXL pipelines: base, refiner, image-to-image, inpainting and InstructPix2Pix."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families import stable_diffusion
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import make_image, mask, prompted
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, clip_text, clip_text_with_projection
from anyaccel.recipes.parts.tokenizers import clip_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES", "denoiser", "parts"]

SIZE = 16
TIME_WIDTH = 8

recipe = functools.partial(make_recipe, family="stable-diffusion-xl")


def denoiser(*, texts: int = 2, sizes: int = 6, **more: Any) -> Any:
    """Return a tiny SDXL UNet for `texts` text encoders and `sizes` size conditions.

    The base model has six size conditions. The refiner has five, including an aesthetic score.
    """
    return stable_diffusion.denoiser(
        **{
            "cross_attention_dim": texts * TEXT_WIDTH,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": TIME_WIDTH,
            "projection_class_embeddings_input_dim": TEXT_WIDTH + sizes * TIME_WIDTH,
            "attention_head_dim": (2, 4),
            "transformer_layers_per_block": (1, 2),
            "use_linear_projection": True,
        }
        | more
    )


def parts(**more: Any) -> dict[str, Any]:
    """Return the components of a tiny SDXL pipeline, without a watermarker."""
    return {
        "vae": autoencoder_kl(scaling_factor=0.13025),
        "text_encoder": clip_text(),
        "text_encoder_2": clip_text_with_projection(hidden_act="gelu"),
        "tokenizer": clip_tokenizer(),
        "tokenizer_2": clip_tokenizer(pad_token="!"),
        "unet": denoiser(),
        "scheduler": diffusers.EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            steps_offset=1,
            timestep_spacing="leading",
        ),
        "add_watermarker": False,
    } | more


def parts_of_refiner() -> dict[str, Any]:
    """Return the components of a tiny SDXL refiner pipeline.

    It has only the second text encoder and is conditioned on an aesthetic score.
    """
    return parts(text_encoder=None, tokenizer=None, unet=denoiser(texts=1, sizes=5), requires_aesthetics_score=True)


def parts_for_instructions() -> dict[str, Any]:
    """Return the components of a tiny SDXL InstructPix2Pix pipeline.

    The UNet also receives the latents of the input image.
    """
    return parts(unet=denoiser(in_channels=8), is_cosxl_edit=False)


RECIPES = (
    recipe(
        name="stable-diffusion-xl",
        pipeline="StableDiffusionXLPipeline",
        parts=parts,
        call=lambda: prompted(height=SIZE, width=SIZE),
    ),
    recipe(
        name="stable-diffusion-xl-refiner",
        pipeline="StableDiffusionXLImg2ImgPipeline",
        parts=parts_of_refiner,
        call=lambda: prompted(image=make_image(SIZE), strength=0.5, num_inference_steps=4),
    ),
    recipe(
        name="stable-diffusion-xl-image-to-image",
        pipeline="StableDiffusionXLImg2ImgPipeline",
        parts=parts,
        call=lambda: prompted(image=make_image(SIZE), strength=0.5, num_inference_steps=4),
    ),
    recipe(
        name="stable-diffusion-xl-inpaint",
        pipeline="StableDiffusionXLInpaintPipeline",
        parts=lambda: parts(unet=denoiser(in_channels=9)),
        call=lambda: prompted(
            image=make_image(SIZE), mask_image=mask(SIZE), height=SIZE, width=SIZE, strength=0.5, num_inference_steps=4
        ),
    ),
    recipe(
        name="stable-diffusion-xl-instruct-pix2pix",
        pipeline="StableDiffusionXLInstructPix2PixPipeline",
        parts=parts_for_instructions,
        call=lambda: prompted(image=make_image(SIZE), height=SIZE, width=SIZE, image_guidance_scale=1.5),
    ),
)
