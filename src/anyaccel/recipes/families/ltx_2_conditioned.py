"""Recipes for tiny LTX-2 pipelines with conditions, dense frame refinement (DFR), upsampling and diffusion decoding."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from anyaccel.recipes.families import ltx_2
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import embedding, make_image, make_video, unprompted
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

# Width and height of the latents, and their frames for nine frames of video.
LATENT_SIZE = ltx_2.SIZE // 4
DFR_FRAMES = 9
DFR_LATENT_FRAMES = 5

recipe = functools.partial(make_recipe, family="ltx")


def upsampler(**more: Any) -> Any:
    """Return a tiny LTX-2 latent upsampler with 32 channels, because its group norms have 32 groups."""
    home = importlib.import_module("diffusers.pipelines.ltx2.latent_upsampler")
    return home.LTX2LatentUpsamplerModel(in_channels=ltx_2.CHANNELS, mid_channels=32, num_blocks_per_stage=1, **more)


def parts_of_dfr(**more: Any) -> dict[str, Any]:
    """Return the components of a tiny DFR pipeline, whose transformer marks the tokens of keyframes."""
    marking = ltx_2.transformer(use_keyframes_abs_pos_embedding=True)
    return ltx_2.parts() | {"transformer": marking, "scheduler": diffusers.FlowMatchEulerDiscreteScheduler()} | more


def parts_of_temporal_refine() -> dict[str, Any]:
    """Return the components of a tiny DFR refinement pipeline, which doubles the frame rate."""
    return parts_of_dfr(
        scheduler=diffusers.LTXEulerAncestralRFScheduler(eta=0.5),
        temporal_latent_upsampler=upsampler(spatial_upsample=False, temporal_upsample=True),
    )


def decoder() -> dict[str, Any]:
    """Return the components of a tiny pipeline that decodes latents in a single denoising step."""
    return {
        "diffusion_decoder": diffusers.LTX2VideoDiffusionDecoderModel(
            latent_channels=8,
            patch_size=2,
            decoder_head_dim=16,
            decoder_stage_channels=(64, 32, 16, 16, 16),
            decoder_stage_depths=(1, 1, 1, 1, 2),
            decoder_stage_kernels=((3, 3, 3),) * 4,
            decoder_upsample_strides=((1, 2, 2), (2, 1, 1), (2, 1, 1), (1, 2, 2)),
            decoder_upsample_channel_reductions=(2, 2, 1, 1),
            decoder_stage5_kernel=(3, 3, 3),
            decoder_t_emb_dim=32,
            spatial_compression_ratio=8,
            temporal_compression_ratio=4,
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
    }


def condition(name: str, module: str, **more: Any) -> Any:
    """Return a condition of the given class, with one image as its frames."""
    home = importlib.import_module(f"diffusers.pipelines.ltx2.{module}")
    return getattr(home, name)(frames=make_image(ltx_2.SIZE), **more)


def image_condition() -> Any:
    """Return a condition that sets the first frame, without compressing it by a video codec."""
    return condition("LTX2VideoCondition", "pipeline_ltx2_condition", crf=0)


def call_dfr(**more: Any) -> dict[str, Any]:
    """Return call arguments for a DFR pipeline, which has fixed sigmas and no guidance."""
    arguments = unprompted(
        prompt="a red fox",
        height=ltx_2.SIZE,
        width=ltx_2.SIZE,
        num_frames=DFR_FRAMES,
        sigmas=[1.0, 0.5],
        max_sequence_length=16,
    )
    del arguments["num_inference_steps"]
    return arguments | more


def call_temporal_refine() -> dict[str, Any]:
    """Return call arguments with the latents, the keyframe and the audio of a first DFR stage."""
    return call_dfr(
        latents=embedding(1, ltx_2.CHANNELS, DFR_LATENT_FRAMES, LATENT_SIZE, LATENT_SIZE),
        keyframes_latents=embedding(1, ltx_2.CHANNELS, 1, LATENT_SIZE, LATENT_SIZE, seed=4),
        keyframe_positions=[8],
        audio_latents=embedding(1, ltx_2.SOUND_CHANNELS, 9, ltx_2.MEL_BINS // 4, seed=5),
        sigmas=[0.75, 0.25],
    )


def call_without_steps(**more: Any) -> dict[str, Any]:
    """Return call arguments without a step count, for pipelines that do not denoise or have fixed steps."""
    arguments = unprompted(**more)
    del arguments["num_inference_steps"]
    return arguments


RECIPES = (
    recipe(
        name="ltx-2-condition",
        pipeline="LTX2ConditionPipeline",
        parts=ltx_2.parts,
        call=lambda: ltx_2.call(conditions=image_condition()),
    ),
    recipe(
        name="ltx-2-in-context",
        pipeline="LTX2InContextPipeline",
        parts=ltx_2.parts,
        call=lambda: ltx_2.call(
            reference_conditions=condition("LTX2ReferenceCondition", "pipeline_ltx2_ic_lora"),
            conditions=image_condition(),
        ),
    ),
    recipe(
        name="ltx-2-hdr",
        pipeline="LTX2HDRPipeline",
        parts=ltx_2.parts,
        call=lambda: ltx_2.call(
            reference_conditions=condition("LTX2HDRReferenceCondition", "pipeline_ltx2_hdr_lora"),
            guidance_scale=1.0,  # its default
            output_type="pt",  # it has no other output type for pixels
        ),
    ),
    recipe(name="ltx-2-dfr", pipeline="LTX2DFRPipeline", parts=parts_of_dfr, call=call_dfr),
    recipe(
        name="ltx-2-dfr-temporal-refine",
        pipeline="LTX2DFRTemporalRefinePipeline",
        parts=parts_of_temporal_refine,
        call=call_temporal_refine,
    ),
    recipe(
        name="ltx-2-latent-upsample",
        pipeline="LTX2LatentUpsamplePipeline",
        parts=lambda: {"vae": ltx_2.autoencoder_of_video(), "latent_upsampler": upsampler()},
        call=lambda: call_without_steps(
            video=make_video(ltx_2.FRAMES, ltx_2.SIZE),
            height=ltx_2.SIZE,
            width=ltx_2.SIZE,
            num_frames=ltx_2.FRAMES,
        ),
    ),
    recipe(
        name="ltx-2-diffusion-decode",
        pipeline="LTX2VideoDiffusionDecodePipeline",
        parts=decoder,
        call=lambda: call_without_steps(latents=embedding(1, 8, 2, 3, 3)),
    ),
)
