"""Recipes for tiny aMUSEd pipelines, which predict masked image tokens with a transformer."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, mask, prompted
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, clip_text_with_projection
from anyaccel.recipes.parts.tokenizers import clip_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16
CODES = 16

recipe = functools.partial(make_recipe, family="amused")


def parts() -> dict[str, Any]:
    """Return the components of a tiny aMUSEd pipeline, with 16 codebook entries and a mask token."""
    return {
        "transformer": diffusers.UVit2DModel(
            hidden_size=16,
            cond_embed_dim=TEXT_WIDTH,
            micro_cond_encode_dim=2,
            micro_cond_embed_dim=10,
            encoder_hidden_size=TEXT_WIDTH,
            vocab_size=CODES + 1,
            codebook_size=CODES,
            in_channels=16,
            block_out_channels=16,
            num_res_blocks=1,
            downsample=True,
            upsample=True,
            block_num_heads=1,
            num_hidden_layers=1,
            num_attention_heads=1,
            intermediate_size=16,
            sample_size=SIZE // 2,
        ),
        "vqvae": diffusers.VQModel(
            block_out_channels=(8, 16),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
            num_vq_embeddings=CODES,
            norm_num_groups=4,
            lookup_from_codebook=True,
            mid_block_add_attention=False,
        ),
        "scheduler": diffusers.AmusedScheduler(mask_token_id=CODES),
        "text_encoder": clip_text_with_projection(),
        "tokenizer": clip_tokenizer(),
    }


RECIPES = (
    recipe(
        name="amused",
        pipeline="AmusedPipeline",
        parts=parts,
        call=lambda: prompted(height=SIZE, width=SIZE),
    ),
    recipe(
        name="amused-image-to-image",
        pipeline="AmusedImg2ImgPipeline",
        parts=parts,
        call=lambda: prompted(image=make_image(SIZE), num_inference_steps=4),
    ),
    recipe(
        name="amused-inpaint",
        pipeline="AmusedInpaintPipeline",
        parts=parts,
        call=lambda: prompted(image=make_image(SIZE), mask_image=mask(SIZE)),
    ),
)
