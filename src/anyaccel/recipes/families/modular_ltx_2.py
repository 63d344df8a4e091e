"""Recipes for tiny modular LTX-2 and LTX-2.5 pipelines: text-to-video and image-to-video, both with audio."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families import ltx_2
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, unprompted
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

recipe = functools.partial(make_recipe, family="ltx")


def guider() -> Any:
    """Return the default guidance for video, with a layer that the tiny transformer has."""
    return diffusers.LTX2Guidance(
        guidance_scale=3.0,
        stg_scale=1.0,
        modality_scale=3.0,
        guidance_rescale=0.7,
        spatio_temporal_guidance_blocks=[1],
    )


def parts() -> dict[str, Any]:
    """Return the components of a tiny modular LTX-2 pipeline, without the prompt enhancer."""
    return ltx_2.parts() | {"guider": guider()}


def parts_of_version_2_5() -> dict[str, Any]:
    """Return the components of a tiny modular LTX-2.5 pipeline, which decodes latents in a denoising step."""
    decoder = diffusers.LTX2VideoDiffusionDecoderModel(
        latent_channels=ltx_2.CHANNELS,
        patch_size=2,
        decoder_head_dim=16,
        decoder_stage_channels=(16, 16, 16),
        decoder_stage_depths=(1, 1, 2),
        decoder_stage_kernels=((3, 3, 3),) * 2,
        decoder_upsample_strides=((1, 1, 1), (2, 2, 2)),
        decoder_upsample_channel_reductions=(1, 1),
        decoder_stage5_kernel=(3, 3, 3),
        decoder_t_emb_dim=32,
        spatial_compression_ratio=4,
        temporal_compression_ratio=2,
    )
    return parts() | {"diffusion_decoder": decoder}


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for a five-frame video."""
    return (
        unprompted(
            output="videos",
            prompt="a red fox",
            negative_prompt="blue",
            height=ltx_2.SIZE,
            width=ltx_2.SIZE,
            num_frames=ltx_2.FRAMES,
            max_sequence_length=16,
        )
        | more
    )


def call_from_image() -> dict[str, Any]:
    """Return call arguments with an image as the first frame."""
    return call(image=make_image(ltx_2.SIZE), image_crf=0)  # crf 0 skips the compression by a video codec


RECIPES = (
    recipe(name="ltx-2-modular", pipeline="LTX2ModularPipeline", parts=parts, call=call),
    recipe(name="ltx-2-modular-image-to-video", pipeline="LTX2ModularPipeline", parts=parts, call=call_from_image),
    recipe(name="ltx-2-5-modular", pipeline="LTX25ModularPipeline", parts=parts_of_version_2_5, call=call),
)
