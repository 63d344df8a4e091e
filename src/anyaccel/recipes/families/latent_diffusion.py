"""Recipe for a tiny Latent Diffusion text-to-image pipeline, the predecessor of Stable Diffusion."""

from __future__ import annotations

import importlib
from typing import Any

from anyaccel.recipes.families.stable_diffusion import denoiser
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import prompted
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import BERT_VOCABULARY, bert_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 64


def parts() -> dict[str, Any]:
    """Return the components of a tiny Latent Diffusion pipeline, whose text encoder is trained with it."""
    home = importlib.import_module("diffusers.pipelines.latent_diffusion.pipeline_latent_diffusion")
    return {
        "vqvae": autoencoder_kl(),
        "bert": home.LDMBertModel(
            home.LDMBertConfig(
                vocab_size=len(BERT_VOCABULARY),
                encoder_layers=2,
                encoder_ffn_dim=37,
                encoder_attention_heads=2,
                head_dim=16,
                d_model=TEXT_WIDTH,
            )
        ),
        "tokenizer": bert_tokenizer(),
        "unet": denoiser(),
        "scheduler": diffusers.DDIMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False
        ),
    }


RECIPES = (
    make_recipe(
        name="latent-diffusion-text-to-image",
        pipeline="LDMTextToImagePipeline",
        family="latent-diffusion",
        parts=parts,
        # The pipeline assumes 8x compression.
        call=lambda: prompted(height=SIZE, width=SIZE),
    ),
)
