"""Recipes for tiny Stable Cascade and Würstchen pipelines.

Each family has a prior, a decoder and a combined pipeline.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import embedding, prompted
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, clip_text, clip_text_with_projection
from anyaccel.recipes.parts.tokenizers import clip_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

# The pipelines divide the size by 42.67 for the latents of the prior, and by 4 for those of the decoder.
SIZE = 128
EMBEDDING = (1, 4, 3, 3)

recipe = functools.partial(make_recipe, family="stable-cascade")


def home(name: str) -> Any:
    """Import a Würstchen module from diffusers by name; diffusers does not export its classes."""
    return importlib.import_module(f"diffusers.pipelines.deprecated.wuerstchen.{name}")


def vqgan() -> Any:
    """Return a tiny VQ autoencoder for Stable Cascade and Würstchen.

    Its scale factor is small, because random weights produce large latents.
    """
    return home("modeling_paella_vq_model").PaellaVQModel(
        levels=2, bottleneck_blocks=1, embed_dim=8, latent_channels=4, num_vq_embeddings=12, scale_factor=0.002
    )


def text() -> dict[str, Any]:
    """Return the tokenizer and text encoder for a tiny Stable Cascade pipeline."""
    return {"tokenizer": clip_tokenizer(), "text_encoder": clip_text_with_projection()}


def unet(**more: Any) -> Any:
    """Return a tiny Stable Cascade UNet for the prior or the decoder, with two levels of width 16."""
    blocks = ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock")
    return diffusers.StableCascadeUNet(
        **{
            "in_channels": 4,
            "out_channels": 4,
            "conditioning_dim": 16,
            "block_out_channels": (16, 16),
            "num_attention_heads": (2, 2),
            "down_num_layers_per_block": (1, 1),
            "up_num_layers_per_block": (1, 1),
            "block_types_per_layer": (blocks, blocks),
            "clip_text_pooled_in_channels": TEXT_WIDTH,
            "switch_level": (False,),
            "dropout": (0.0, 0.0),
        }
        | more
    )


def prior() -> dict[str, Any]:
    """Return the components of a tiny Stable Cascade prior pipeline, which is the first stage."""
    network = unet(clip_text_in_channels=TEXT_WIDTH, clip_image_in_channels=TEXT_WIDTH)
    return text() | {"prior": network, "scheduler": diffusers.DDPMWuerstchenScheduler()}


def decoder() -> dict[str, Any]:
    """Return the components of a tiny Stable Cascade decoder pipeline, which is the second stage."""
    network = unet(effnet_in_channels=4, patch_size=2, timestep_conditioning_type=("sca",))
    return text() | {
        "decoder": network,
        "scheduler": diffusers.DDPMWuerstchenScheduler(),
        "vqgan": vqgan(),
        "latent_dim_scale": 4.0,
    }


def both() -> dict[str, Any]:
    """Return the components of a tiny Stable Cascade pipeline that combines prior and decoder."""
    second = decoder()
    del second["latent_dim_scale"]
    return second | {f"prior_{name}": part for name, part in prior().items()}


def call_both(**more: Any) -> dict[str, Any]:
    """Return call arguments for a combined pipeline, with two prior steps."""
    arguments = prompted(height=SIZE, width=SIZE, prior_num_inference_steps=2, decoder_guidance_scale=2.0, **more)
    del arguments["guidance_scale"]
    return arguments


def wuerstchen_prior() -> dict[str, Any]:
    """Return the components of a tiny Würstchen prior pipeline, which is the first stage."""
    network = home("modeling_wuerstchen_prior").WuerstchenPrior(
        c_in=4, c=16, c_cond=TEXT_WIDTH, c_r=8, depth=1, nhead=2, dropout=0.0
    )
    return {
        "tokenizer": clip_tokenizer(),
        "text_encoder": clip_text(),
        "prior": network,
        "scheduler": diffusers.DDPMWuerstchenScheduler(),
    }


def wuerstchen_decoder() -> dict[str, Any]:
    """Return the components of a tiny Würstchen decoder pipeline, which is the second stage."""
    network = home("modeling_wuerstchen_diffnext").WuerstchenDiffNeXt(
        c_cond=TEXT_WIDTH,
        c_hidden=[16, 16, 16, 16],
        nhead=[-1, 2, 2, 2],
        blocks=[1, 1, 1, 1],
        level_config=["CT", "CTA", "CTA", "CTA"],
        effnet_embd=4,
        clip_embd=TEXT_WIDTH,
        dropout=0.0,
    )
    return {
        "tokenizer": clip_tokenizer(),
        "text_encoder": clip_text(),
        "decoder": network,
        "scheduler": diffusers.DDPMWuerstchenScheduler(),
        "vqgan": vqgan(),
        "latent_dim_scale": 10.67,
    }


def wuerstchen_both() -> dict[str, Any]:
    """Return the components of a tiny Würstchen pipeline that combines prior and decoder."""
    second = wuerstchen_decoder()
    del second["latent_dim_scale"]
    return second | {f"prior_{name}": part for name, part in wuerstchen_prior().items()}


RECIPES = (
    recipe(
        name="stable-cascade-prior",
        pipeline="StableCascadePriorPipeline",
        parts=prior,
        call=lambda: prompted(height=SIZE, width=SIZE),
    ),
    recipe(
        name="stable-cascade",
        pipeline="StableCascadeDecoderPipeline",
        parts=decoder,
        call=lambda: prompted(image_embeddings=embedding(*EMBEDDING)),
    ),
    recipe(
        name="stable-cascade-combined",
        pipeline="StableCascadeCombinedPipeline",
        parts=both,
        call=call_both,
    ),
    recipe(
        name="wuerstchen-prior",
        pipeline="WuerstchenPriorPipeline",
        parts=wuerstchen_prior,
        call=lambda: prompted(height=SIZE, width=SIZE),
    ),
    recipe(
        name="wuerstchen",
        pipeline="WuerstchenDecoderPipeline",
        parts=wuerstchen_decoder,
        call=lambda: prompted(image_embeddings=embedding(*EMBEDDING)),
    ),
    recipe(
        name="wuerstchen-combined",
        pipeline="WuerstchenCombinedPipeline",
        parts=wuerstchen_both,
        call=call_both,
    ),
)
