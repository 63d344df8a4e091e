"""Recipes for tiny Cosmos pipelines: Cosmos 1, Cosmos Predict 2 and Predict 2.5."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families.wan import autoencoder_wan
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, make_video, prompted
from anyaccel.recipes.parts.language_models import qwen_2_5_vl
from anyaccel.recipes.parts.safety_checkers import CosmosSafetyChecker
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, t5_encoder
from anyaccel.recipes.parts.tokenizers import qwen_tokenizer, t5_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 32
FRAMES = 5
CHANNELS = 4

recipe = functools.partial(make_recipe, family="cosmos")


def autoencoder_cosmos() -> Any:
    """Return a tiny Cosmos 1 autoencoder, which applies a Haar wavelet transform before its convolutions."""
    return diffusers.AutoencoderKLCosmos(
        latent_channels=CHANNELS,
        encoder_block_out_channels=(8, 8, 8, 8),
        decode_block_out_channels=(8, 8, 8, 8),
        attention_resolutions=(8,),
        resolution=64,
        num_layers=1,
        patch_size=4,
        patch_type="haar",
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
        # By default, as many values as the real autoencoder has channels.
        latents_mean=None,
        latents_std=None,
    )


def transformer_shape(**more: Any) -> dict[str, Any]:
    """Return constructor arguments for a tiny transformer with two layers."""
    return {
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "mlp_ratio": 2,
        "text_embed_dim": TEXT_WIDTH,
        "adaln_lora_dim": 4,
        "max_size": (8, 32, 32),
        "patch_size": (1, 2, 2),
        # The padding mask, which the pipelines fill with zeros, is resized with torchvision.
        "concat_padding_mask": False,
    } | more


def parts(*, in_channels: int = CHANNELS, **more: Any) -> dict[str, Any]:
    """Return the components of a tiny Cosmos 1 pipeline.

    Pipelines that continue an image or a video have a mask as an additional input channel.
    """
    return {
        "text_encoder": t5_encoder(),
        "tokenizer": t5_tokenizer(),
        "transformer": diffusers.CosmosTransformer3DModel(**transformer_shape(in_channels=in_channels)),
        "vae": autoencoder_cosmos(),
        "scheduler": diffusers.EDMEulerScheduler(
            sigma_max=80, sigma_data=0.5, prediction_type="epsilon", final_sigmas_type="sigma_min"
        ),
        "safety_checker": CosmosSafetyChecker(),
    } | more


def parts_of_predict_2(*, in_channels: int = CHANNELS) -> dict[str, Any]:
    """Return the components of a tiny Cosmos Predict 2 pipeline, which uses the Wan autoencoder."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)
    return parts(in_channels=in_channels, vae=autoencoder_wan(), scheduler=scheduler)


def parts_of_version_2_5() -> dict[str, Any]:
    """Return the components of a tiny Cosmos Predict 2.5 pipeline, whose text encoder is Qwen2.5-VL."""
    shape = transformer_shape(
        in_channels=CHANNELS + 1,
        use_crossattn_projection=True,
        # The hidden states of both layers of the text encoder.
        crossattn_proj_in_channels=2 * TEXT_WIDTH,
        encoder_hidden_states_channels=TEXT_WIDTH,
    )
    return parts() | {
        "text_encoder": qwen_2_5_vl(),
        "tokenizer": qwen_tokenizer(),
        "transformer": diffusers.CosmosTransformer3DModel(**shape),
        "vae": autoencoder_wan(),
        "scheduler": diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, use_karras_sigmas=True
        ),
    }


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for a five-frame video with a negative prompt."""
    return prompted(negative_prompt="blue", height=SIZE, width=SIZE, num_frames=FRAMES, max_sequence_length=16) | more


def call_image() -> dict[str, Any]:
    """Return call arguments for an image."""
    arguments = call()
    del arguments["num_frames"]
    return arguments


RECIPES = (
    recipe(name="cosmos", pipeline="CosmosTextToWorldPipeline", parts=parts, call=call),
    recipe(
        name="cosmos-video",
        pipeline="CosmosVideoToWorldPipeline",
        parts=lambda: parts(in_channels=CHANNELS + 1),
        call=lambda: call(video=make_video(FRAMES, SIZE), num_frames=9),
    ),
    recipe(name="cosmos-2-image", pipeline="Cosmos2TextToImagePipeline", parts=parts_of_predict_2, call=call_image),
    recipe(
        name="cosmos-2-video",
        pipeline="Cosmos2VideoToWorldPipeline",
        parts=lambda: parts_of_predict_2(in_channels=CHANNELS + 1),
        call=lambda: call(image=make_image(SIZE)),
    ),
    recipe(
        name="cosmos-2-5",
        pipeline="Cosmos2_5_PredictBasePipeline",
        parts=parts_of_version_2_5,
        # Enough tokens for the system message and the prompt, one per character. The last five frames of the video
        # are continued.
        call=lambda: call(video=make_video(FRAMES, SIZE), num_frames=9, max_sequence_length=160),
    ),
)
