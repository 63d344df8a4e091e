"""Recipes for tiny Shap-E pipelines, which create 3D objects: from text and from an image."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, prompted, unprompted
from anyaccel.recipes.parts.image_encoders import clip_image_processor, clip_vision_model
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, clip_text_with_projection
from anyaccel.recipes.parts.tokenizers import clip_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

LATENT_WIDTH = 16

recipe = functools.partial(make_recipe, family="shap-e")


def parts(**more: Any) -> dict[str, Any]:
    """Return the components shared by the pipelines: a prior for the latents and a renderer.

    The prior predicts the weights of the renderer's neural radiance field.
    """
    home = importlib.import_module("diffusers.pipelines.shap_e.renderer")
    return {
        "prior": diffusers.PriorTransformer(
            num_attention_heads=2,
            attention_head_dim=16,
            embedding_dim=LATENT_WIDTH,
            num_embeddings=32,
            embedding_proj_dim=TEXT_WIDTH,
            time_embed_dim=64,
            num_layers=1,
            clip_embed_dim=2 * LATENT_WIDTH,
            additional_embeddings=0,
            time_embed_act_fn="gelu",
            norm_in_type="layer",
            encoder_hid_proj_type=None,
            added_emb_type=None,
        ),
        "scheduler": diffusers.HeunDiscreteScheduler(
            beta_schedule="exp",
            num_train_timesteps=1024,
            prediction_type="sample",
            use_karras_sigmas=True,
            clip_sample=True,
            clip_sample_range=1.0,
        ),
        "shap_e_renderer": home.ShapERenderer(
            # 93 features encode a position. The latents are divided among the four layers.
            param_shapes=((8, 93), (8, 8), (8, 8), (8, 8)),
            d_latent=LATENT_WIDTH,
            d_hidden=8,
            background=(0.1, 0.1, 0.1),
        ),
    } | more


def parts_from_text() -> dict[str, Any]:
    """Return the components of a tiny text-to-3D pipeline."""
    return parts(text_encoder=clip_text_with_projection(), tokenizer=clip_tokenizer())


def parts_from_image() -> dict[str, Any]:
    """Return the components of a tiny image-to-3D pipeline."""
    return parts(image_encoder=clip_vision_model(), image_processor=clip_image_processor())


RECIPES = (
    recipe(
        name="shap-e",
        pipeline="ShapEPipeline",
        parts=parts_from_text,
        # The smallest frames that the renderer supports take 20480 rays with 192 samples each, which takes a minute.
        call=lambda: prompted(output_type="latent"),
    ),
    recipe(
        name="shap-e-image-to-image",
        pipeline="ShapEImg2ImgPipeline",
        parts=parts_from_image,
        call=lambda: unprompted(image=make_image(32), guidance_scale=3.0, output_type="latent"),
    ),
)
