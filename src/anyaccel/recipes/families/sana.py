"""Recipes for tiny SANA pipelines: text-to-image, SANA-Sprint, ControlNet and video."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families.wan import autoencoder_wan
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, prompted
from anyaccel.recipes.parts.language_models import gemma_2
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import gemma_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES", "parts", "transformer_shape"]

SIZE = 32
CHANNELS = 4

recipe = functools.partial(make_recipe, family="sana")


def autoencoder_dc() -> Any:
    """Return a tiny deep compression autoencoder (DC-AE) with linear attention at the lower level."""
    return diffusers.AutoencoderDC(
        latent_channels=CHANNELS,
        attention_head_dim=4,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        scaling_factor=0.41407,
    )


def transformer_shape(**more: Any) -> dict[str, Any]:
    """Return the constructor arguments shared by the transformer and its ControlNet."""
    return {
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 2,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 8,
        "cross_attention_dim": 16,
        "caption_channels": TEXT_WIDTH,
        "sample_size": SIZE // 2,
    } | more


def parts(**more: Any) -> dict[str, Any]:
    """Return the components of a tiny SANA pipeline."""
    return {
        "tokenizer": gemma_tokenizer(),
        "text_encoder": gemma_2(),
        "vae": autoencoder_dc(),
        "transformer": diffusers.SanaTransformer2DModel(**transformer_shape()),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    } | more


def parts_of_sprint() -> dict[str, Any]:
    """Return the components of a tiny SANA-Sprint pipeline.

    The transformer receives the guidance scale as an embedding.
    """
    return parts(
        transformer=diffusers.SanaTransformer2DModel(
            **transformer_shape(guidance_embeds=True, qk_norm="rms_norm_across_heads")
        ),
        scheduler=diffusers.SCMScheduler(),
    )


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments that disable resolution binning and the long default prompt instruction.

    Resolution binning supports only large image sizes.
    """
    return (
        prompted(
            height=SIZE,
            width=SIZE,
            use_resolution_binning=False,
            complex_human_instruction=None,
            max_sequence_length=32,
        )
        | more
    )


def parts_of_video() -> dict[str, Any]:
    """Return the components of a tiny SANA-Video pipeline, which uses the Wan autoencoder."""
    shape = transformer_shape(
        patch_size=(1, 2, 2),
        attention_head_dim=12,
        cross_attention_dim=24,
        cross_attention_head_dim=12,
        rope_max_seq_len=32,
    )
    return parts(vae=autoencoder_wan(), transformer=diffusers.SanaVideoTransformer3DModel(**shape))


RECIPES = (
    recipe(
        name="sana-video",
        pipeline="SanaVideoPipeline",
        parts=parts_of_video,
        call=lambda: call(frames=5),
    ),
    recipe(
        name="sana-image-to-video",
        pipeline="SanaImageToVideoPipeline",
        parts=parts_of_video,
        call=lambda: call(image=make_image(SIZE), frames=5),
    ),
    recipe(
        name="sana-controlnet",
        pipeline="SanaControlNetPipeline",
        parts=lambda: parts(controlnet=diffusers.SanaControlNetModel(**transformer_shape(num_layers=1))),
        call=lambda: call(control_image=make_image(SIZE)),
    ),
    recipe(name="sana", pipeline="SanaPipeline", parts=parts, call=call),
    recipe(name="sana-sprint", pipeline="SanaSprintPipeline", parts=parts_of_sprint, call=call),
    recipe(
        name="sana-sprint-image-to-image",
        pipeline="SanaSprintImg2ImgPipeline",
        parts=parts_of_sprint,
        call=lambda: call(image=make_image(SIZE), strength=0.5, num_inference_steps=4, intermediate_timesteps=None),
    ),
)
