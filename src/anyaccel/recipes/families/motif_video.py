"""Recipes for tiny Motif-Video pipelines: text-to-video and image-to-video."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families import wan
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, unprompted
from anyaccel.recipes.parts.image_encoders import IMAGE_WIDTH, siglip_image_processor
from anyaccel.recipes.parts.language_models import t5_gemma_2_encoder
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import gemma_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

recipe = functools.partial(make_recipe, family="motif-video")


def parts(**more: Any) -> dict[str, Any]:
    """Return the components of a tiny Motif-Video pipeline.

    The transformer also receives the latents of the first frame and a mask.
    """
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        "vae": wan.autoencoder_wan(),
        "text_encoder": t5_gemma_2_encoder(),
        "tokenizer": gemma_tokenizer(),
        "transformer": diffusers.MotifVideoTransformer3DModel(
            **{
                "in_channels": 2 * wan.CHANNELS + 1,
                "out_channels": wan.CHANNELS,
                "num_attention_heads": 2,
                "attention_head_dim": 12,
                "num_layers": 1,
                "num_single_layers": 1,
                "patch_size": 2,
                "text_embed_dim": TEXT_WIDTH,
                "rope_axes_dim": (4, 4, 4),
            }
            | more
        ),
        "guider": diffusers.AdaptiveProjectedGuidance(),
        "feature_extractor": siglip_image_processor(),
    }


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for a five-frame video; the guidance scale is a setting of the guider."""
    return (
        unprompted(
            prompt="a red fox",
            negative_prompt="blue",
            height=wan.SIZE,
            width=wan.SIZE,
            num_frames=wan.FRAMES,
            max_sequence_length=16,
        )
        | more
    )


RECIPES = (
    recipe(name="motif-video", pipeline="MotifVideoPipeline", parts=parts, call=call),
    recipe(
        name="motif-video-image-to-video",
        pipeline="MotifVideoImage2VideoPipeline",
        parts=lambda: parts(image_embed_dim=IMAGE_WIDTH),
        call=lambda: call(image=make_image(wan.SIZE)),
    ),
)
