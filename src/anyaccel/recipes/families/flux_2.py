"""Recipes for tiny FLUX.2 and FLUX.2 Klein pipelines."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families.flux import flow_scheduler
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, mask, prompted
from anyaccel.recipes.parts.language_models import mistral_3, qwen_3
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import qwen_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES", "autoencoder_flux_2"]

SIZE = 16
# Hidden states of the language model to read; the real model reads layers 9, 18 and 27.
LAYERS = (0, 1, 2)

recipe = functools.partial(make_recipe, family="flux-2")


def autoencoder_flux_2() -> Any:
    """Return a tiny FLUX.2 autoencoder, which normalizes latents with a batch norm."""
    return diffusers.AutoencoderKLFlux2(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=SIZE,
    )


def parts(*, text_encoder: Any, guidance_embeds: bool, **more: Any) -> dict[str, Any]:
    """Return the components of a tiny FLUX.2 or FLUX.2 Klein pipeline with the given text encoder."""
    return {
        "scheduler": flow_scheduler(),
        "vae": autoencoder_flux_2(),
        "text_encoder": text_encoder,
        "tokenizer": qwen_tokenizer(),
        "transformer": diffusers.Flux2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=len(LAYERS) * TEXT_WIDTH,
            timestep_guidance_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
            **({} if guidance_embeds else {"guidance_embeds": False}),  # diffusers 0.36 has no such argument
        ),
    } | more


def parts_of_klein(**more: Any) -> dict[str, Any]:
    """Return the components of a tiny FLUX.2 Klein pipeline, with Qwen3 as the text encoder.

    The transformer has no guidance embedding.
    """
    return parts(text_encoder=qwen_3(), guidance_embeds=False, **more)


def shorten_text(pipe: Any) -> None:
    """Shorten the pipeline's system message, because the tiny tokenizers use one token per letter."""
    pipe.system_message = "Describe."


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments with a sequence length that fits the prompt and its chat template."""
    return prompted(height=SIZE, width=SIZE, max_sequence_length=64, text_encoder_out_layers=LAYERS) | more


def call_without_guidance() -> dict[str, Any]:
    """Return call arguments for the distilled model, which does not use classifier-free guidance."""
    arguments = call(image=make_image(64))  # the smallest size that it accepts
    del arguments["guidance_scale"]
    return arguments


RECIPES = (
    recipe(
        name="flux-2",
        pipeline="Flux2Pipeline",
        finish=shorten_text,
        parts=lambda: parts(text_encoder=mistral_3(), guidance_embeds=True),
        call=call,
    ),
    recipe(name="flux-2-klein", pipeline="Flux2KleinPipeline", parts=parts_of_klein, call=call),
    recipe(
        name="flux-2-klein-inpaint",
        pipeline="Flux2KleinInpaintPipeline",
        parts=parts_of_klein,
        call=lambda: call(image=make_image(SIZE), mask_image=mask(SIZE), strength=0.5, num_inference_steps=4),
    ),
    recipe(
        name="flux-2-klein-kv",
        pipeline="Flux2KleinKVPipeline",
        parts=lambda: parts_of_klein(is_distilled=True),
        call=call_without_guidance,
    ),
)
