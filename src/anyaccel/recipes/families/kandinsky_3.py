"""Recipes for tiny Kandinsky 3 pipelines: text-to-image and image-to-image."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.autoencoders import movq
from anyaccel.recipes.parts.calls import make_image, prompted
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, t5_encoder
from anyaccel.recipes.parts.tokenizers import t5_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16

recipe = functools.partial(make_recipe, family="kandinsky-3")


def parts() -> dict[str, Any]:
    """Return the components of a tiny Kandinsky 3 pipeline."""
    return {
        "tokenizer": t5_tokenizer(),
        "text_encoder": t5_encoder(),
        "unet": diffusers.Kandinsky3UNet(
            time_embedding_dim=16,
            groups=2,
            attention_head_dim=4,
            layers_per_block=3,
            block_out_channels=(8, 8, 16, 16),
            cross_attention_dim=16,
            encoder_hid_dim=TEXT_WIDTH,
        ),
        "scheduler": diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2", clip_sample=True, thresholding=False),
        "movq": movq(),
    }


RECIPES = (
    recipe(
        name="kandinsky-3",
        pipeline="Kandinsky3Pipeline",
        parts=parts,
        call=lambda: prompted(height=SIZE, width=SIZE),
    ),
    recipe(
        name="kandinsky-3-image-to-image",
        pipeline="Kandinsky3Img2ImgPipeline",
        parts=parts,
        call=lambda: prompted(image=make_image(4 * SIZE), strength=0.5, num_inference_steps=4),
    ),
)
