"""Recipe for a tiny HiDream-I1 pipeline."""

from __future__ import annotations

from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import prompted
from anyaccel.recipes.parts.language_models import llama_with_head
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, clip_text_with_projection, t5_encoder
from anyaccel.recipes.parts.tokenizers import clip_tokenizer, llama_tokenizer, t5_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 32


def parts() -> dict[str, Any]:
    """Return the components of a tiny HiDream-I1 pipeline.

    It has four text encoders and a mixture-of-experts transformer.
    """
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        "vae": autoencoder_kl(shift_factor=0.1159, scaling_factor=0.3611),
        "text_encoder": clip_text_with_projection(),
        "tokenizer": clip_tokenizer(),
        "text_encoder_2": clip_text_with_projection(hidden_act="gelu"),
        "tokenizer_2": clip_tokenizer(),
        "text_encoder_3": t5_encoder(),
        "tokenizer_3": t5_tokenizer(),
        "text_encoder_4": llama_with_head(attn_implementation="eager"),
        "tokenizer_4": llama_tokenizer(),
        "transformer": diffusers.HiDreamImageTransformer2DModel(
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_channels=[TEXT_WIDTH, TEXT_WIDTH],
            text_emb_dim=2 * TEXT_WIDTH,
            axes_dims_rope=(4, 2, 2),
            max_resolution=(32, 32),
            llama_layers=(0, 1),
            force_inference_output=True,
        ),
    }


def allow_small_sizes(pipe: Any) -> None:
    """Allow small images; by default, the pipeline scales the requested size up to its training area."""
    pipe.default_sample_size = SIZE // 2


RECIPES = (
    make_recipe(
        name="hidream",
        pipeline="HiDreamImagePipeline",
        family="hidream",
        parts=parts,
        finish=allow_small_sizes,
        call=lambda: prompted(height=SIZE, width=SIZE, max_sequence_length=32),
    ),
)
