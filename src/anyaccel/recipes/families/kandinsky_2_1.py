"""Recipes for tiny Kandinsky 2.1 pipelines.

They cover the prior, the decoder, image-to-image, inpainting and the combined pipelines.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from anyaccel.recipes.families.kandinsky_2_2 import decoder as decoder_of_version_2_2
from anyaccel.recipes.families.kandinsky_2_2 import denoiser, prior
from anyaccel.recipes.parts.calls import embedding, make_image, mask, prompted
from anyaccel.recipes.parts.image_encoders import IMAGE_WIDTH
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import XLM_VOCABULARY, xlm_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 64

recipe = functools.partial(make_recipe, family="kandinsky-2-1")


def text_encoder() -> Any:
    """Return a tiny multilingual CLIP text encoder for Kandinsky 2.1."""
    home = importlib.import_module("diffusers.pipelines.kandinsky.text_encoder")
    return home.MultilingualCLIP(
        home.MCLIPConfig(
            numDims=IMAGE_WIDTH,
            transformerDimensions=TEXT_WIDTH,
            hidden_size=TEXT_WIDTH,
            intermediate_size=37,
            num_attention_heads=4,
            num_hidden_layers=2,
            vocab_size=len(XLM_VOCABULARY),
            max_position_embeddings=90,
        )
    )


def decoder(*, in_channels: int = 4) -> dict[str, Any]:
    """Return the components of a tiny Kandinsky 2.1 decoder pipeline.

    It generates an image from a prompt and an image embedding.
    """
    unet = denoiser(
        in_channels=in_channels,
        addition_embed_type="text_image",
        addition_embed_type_num_heads=4,
        encoder_hid_dim=TEXT_WIDTH,
        encoder_hid_dim_type="text_image_proj",
        cross_attention_dim=IMAGE_WIDTH,
    )
    return decoder_of_version_2_2(unet=unet) | {"text_encoder": text_encoder(), "tokenizer": xlm_tokenizer()}


def both(*, in_channels: int = 4) -> dict[str, Any]:
    """Return the components of a tiny combined pipeline: those of the prior and of the decoder."""
    return decoder(in_channels=in_channels) | {f"prior_{name}": part for name, part in prior().items()}


def call_decoder(**more: Any) -> dict[str, Any]:
    """Return call arguments for the decoder, with random embeddings instead of the prior's output."""
    return (
        prompted(
            image_embeds=embedding(1, IMAGE_WIDTH),
            negative_image_embeds=embedding(1, IMAGE_WIDTH, seed=4),
            height=SIZE,
            width=SIZE,
        )
        | more
    )


def call_both(**more: Any) -> dict[str, Any]:
    """Return call arguments for the combined pipeline, with two prior steps."""
    return prompted(height=SIZE, width=SIZE, prior_num_inference_steps=2) | more


RECIPES = (
    recipe(name="kandinsky-2-1-prior", pipeline="KandinskyPriorPipeline", parts=prior, call=prompted),
    recipe(name="kandinsky-2-1", pipeline="KandinskyPipeline", parts=decoder, call=call_decoder),
    recipe(
        name="kandinsky-2-1-image-to-image",
        pipeline="KandinskyImg2ImgPipeline",
        parts=decoder,
        call=lambda: call_decoder(image=make_image(SIZE), strength=0.5, num_inference_steps=4),
    ),
    recipe(
        name="kandinsky-2-1-inpaint",
        pipeline="KandinskyInpaintPipeline",
        parts=lambda: decoder(in_channels=9),
        call=lambda: call_decoder(image=make_image(SIZE), mask_image=mask(SIZE)),
    ),
    recipe(name="kandinsky-2-1-combined", pipeline="KandinskyCombinedPipeline", parts=both, call=call_both),
    recipe(
        name="kandinsky-2-1-combined-image-to-image",
        pipeline="KandinskyImg2ImgCombinedPipeline",
        parts=both,
        call=lambda: call_both(image=make_image(SIZE), strength=0.5, num_inference_steps=4),
    ),
    recipe(
        name="kandinsky-2-1-combined-inpaint",
        pipeline="KandinskyInpaintCombinedPipeline",
        parts=lambda: both(in_channels=9),
        call=lambda: call_both(image=make_image(SIZE), mask_image=mask(SIZE)),
    ),
)
