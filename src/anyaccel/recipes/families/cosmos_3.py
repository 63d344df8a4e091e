"""Recipe for a tiny Cosmos 3 pipeline, whose transformer processes text, images and videos."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families.wan import CHANNELS, autoencoder_wan
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, prompted
from anyaccel.recipes.parts.tokenizers import QWEN_VOCABULARY, qwen_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16

recipe = functools.partial(make_recipe, family="cosmos")


def parts() -> dict[str, Any]:
    """Return the components of a tiny Cosmos 3 pipeline without its optional safety checker and audio."""
    return {
        "transformer": diffusers.Cosmos3OmniTransformer(
            head_dim=12,
            hidden_size=24,
            intermediate_size=37,
            latent_channel=CHANNELS,
            latent_patch_size=2,
            patch_latent_dim=4 * CHANNELS,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_hidden_layers=2,
            rope_axes_dim=[2, 2, 2],
            vocab_size=len(QWEN_VOCABULARY),
        ),
        "text_tokenizer": qwen_tokenizer(),
        "vae": autoencoder_wan(),
        "scheduler": diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        "enable_safety_checker": False,
    }


RECIPES = (
    recipe(
        name="cosmos-3",
        pipeline="Cosmos3OmniPipeline",
        parts=parts,
        call=lambda: prompted(
            image=make_image(SIZE),
            negative_prompt="blue",
            height=SIZE,
            width=SIZE,
            num_frames=5,
            use_system_prompt=False,
        ),
    ),
)
