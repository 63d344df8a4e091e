"""Recipes for tiny Z-Image pipelines: text-to-image, image-to-image, inpainting, ControlNet and Omni."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import make_image, mask, prompted
from anyaccel.recipes.parts.image_encoders import IMAGE_WIDTH, siglip_2_image_processor, siglip_2_vision
from anyaccel.recipes.parts.language_models import qwen_3_model
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import qwen_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16

recipe = functools.partial(make_recipe, family="z-image")


def transformer(**more: Any) -> Any:
    """Return a tiny Z-Image transformer."""
    return diffusers.ZImageTransformer2DModel(
        **{
            "in_channels": 4,
            "dim": 32,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": TEXT_WIDTH,
            "axes_dims": [4, 6, 6],
            "axes_lens": [256, 32, 32],
        }
        | more
    )


def parts(**more: Any) -> dict[str, Any]:
    """Return the components of a tiny Z-Image pipeline."""
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        "vae": autoencoder_kl(scaling_factor=0.3611, shift_factor=0.1159),
        "text_encoder": qwen_3_model(),
        "tokenizer": qwen_tokenizer(),
        "transformer": transformer(),
    } | more


def parts_of_omni() -> dict[str, Any]:
    """Return the components of a tiny Z-Image Omni pipeline, which can show condition images to SigLIP 2."""
    return parts(
        transformer=transformer(siglip_feat_dim=IMAGE_WIDTH),
        siglip=siglip_2_vision(),
        siglip_processor=siglip_2_image_processor(),
    )


def controlnet(*, channels: int) -> Any:
    """Return a tiny Z-Image ControlNet with `channels` input channels.

    It shares its embedders with the transformer.
    """
    return diffusers.ZImageControlNetModel(
        control_layers_places=[0, 1],
        control_refiner_layers_places=[0],
        control_in_dim=channels,
        add_control_noise_refiner="control_noise_refiner",
        dim=32,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
    )


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments with a sequence length that fits the prompt and its chat template."""
    return prompted(negative_prompt="blue", height=SIZE, width=SIZE, max_sequence_length=64) | more


RECIPES = (
    recipe(name="z-image", pipeline="ZImagePipeline", parts=parts, call=call),
    recipe(
        name="z-image-image-to-image",
        pipeline="ZImageImg2ImgPipeline",
        parts=parts,
        call=lambda: call(image=make_image(SIZE), strength=0.5, num_inference_steps=4),
    ),
    recipe(
        name="z-image-inpaint",
        pipeline="ZImageInpaintPipeline",
        parts=parts,
        call=lambda: call(image=make_image(SIZE), mask_image=mask(SIZE), strength=0.5, num_inference_steps=4),
    ),
    recipe(
        name="z-image-controlnet",
        pipeline="ZImageControlNetPipeline",
        parts=lambda: parts(controlnet=controlnet(channels=4)),
        call=lambda: call(control_image=make_image(SIZE)),
    ),
    recipe(
        name="z-image-controlnet-inpaint",
        pipeline="ZImageControlNetInpaintPipeline",
        parts=lambda: parts(controlnet=controlnet(channels=9)),
        call=lambda: call(image=make_image(SIZE), mask_image=mask(SIZE), control_image=make_image(SIZE, seed=2)),
    ),
    recipe(
        name="z-image-omni",
        pipeline="ZImageOmniPipeline",
        parts=parts_of_omni,
        # Without condition images: diffusers 0.42 converts them to bfloat16, which a float32 autoencoder rejects.
        call=call,
    ),
)
