"""Recipes for tiny LTX-Video pipelines.

They cover text-to-video, image-to-video, conditioning on an image and latent upsampling.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from anyaccel.recipes.families.flux import flow_scheduler
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, make_video, prompted, unprompted
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, t5_encoder
from anyaccel.recipes.parts.tokenizers import t5_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 32
FRAMES = 9
CHANNELS = 8

recipe = functools.partial(make_recipe, family="ltx")


def autoencoder_ltx() -> Any:
    """Return a tiny LTX-Video autoencoder, which reduces width, height and frame count by a factor of 4."""
    return diffusers.AutoencoderKLLTXVideo(
        latent_channels=CHANNELS,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        patch_size=1,
        patch_size_t=1,
    )


def parts() -> dict[str, Any]:
    """Return the components of a tiny LTX-Video pipeline."""
    return {
        "scheduler": flow_scheduler(),
        "vae": autoencoder_ltx(),
        "text_encoder": t5_encoder(),
        "tokenizer": t5_tokenizer(),
        "transformer": diffusers.LTXVideoTransformer3DModel(
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_attention_heads=4,
            attention_head_dim=8,
            cross_attention_dim=32,
            num_layers=1,
            caption_channels=TEXT_WIDTH,
        ),
    }


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for a nine-frame video."""
    return prompted(height=SIZE, width=SIZE, num_frames=FRAMES, max_sequence_length=32) | more


def parts_of_upsampler() -> dict[str, Any]:
    """Return the components of a tiny latent upsampler pipeline.

    The upsampler has 32 channels, because its group norms have 32 groups.
    """
    home = importlib.import_module("diffusers.pipelines.ltx.modeling_latent_upsampler")
    network = home.LTXLatentUpsamplerModel(in_channels=CHANNELS, mid_channels=32, num_blocks_per_stage=1)
    return {"vae": autoencoder_ltx(), "latent_upsampler": network}


def call_upsampler() -> dict[str, Any]:
    """Return call arguments with an input video and no step count, because the upsampler does not denoise."""
    arguments = unprompted(video=make_video(FRAMES, SIZE), height=SIZE, width=SIZE)
    del arguments["num_inference_steps"]
    return arguments


def call_long() -> dict[str, Any]:
    """Return call arguments for a video of several overlapping temporal tiles, with two prompts."""
    return call(
        prompt=["a red fox", "a blue bird"],
        cond_image=make_image(SIZE),
        num_frames=17,
        temporal_tile_size=9,
        temporal_overlap=5,
        decode_horizontal_tiles=2,
        decode_vertical_tiles=2,
        decode_overlap=1,
    )


RECIPES = (
    recipe(
        name="ltx-long-multi-prompt",
        pipeline="LTXI2VLongMultiPromptPipeline",
        parts=lambda: parts() | {"scheduler": diffusers.LTXEulerAncestralRFScheduler()},
        call=call_long,
    ),
    recipe(
        name="ltx-latent-upsample",
        pipeline="LTXLatentUpsamplePipeline",
        parts=parts_of_upsampler,
        call=call_upsampler,
    ),
    recipe(name="ltx", pipeline="LTXPipeline", parts=parts, call=call),
    recipe(
        name="ltx-image-to-video",
        pipeline="LTXImageToVideoPipeline",
        parts=parts,
        call=lambda: call(image=make_image(SIZE)),
    ),
    recipe(
        name="ltx-condition",
        pipeline="LTXConditionPipeline",
        parts=lambda: parts() | {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler()},
        call=lambda: call(image=make_image(SIZE), strength=0.8),
    ),
)
