"""Recipes for tiny unCLIP pipelines, which are conditioned on an image embedding."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from anyaccel.recipes.families import stable_diffusion
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import make_image, prompted, unprompted
from anyaccel.recipes.parts.image_encoders import IMAGE_WIDTH, clip_image_processor, clip_vision
from anyaccel.recipes.parts.text_encoders import clip_text, clip_text_with_projection
from anyaccel.recipes.parts.tokenizers import clip_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16

recipe = functools.partial(make_recipe, family="unclip")


def prior() -> Any:
    """Return a tiny prior transformer, which maps a prompt to an image embedding."""
    return diffusers.PriorTransformer(
        num_attention_heads=2, attention_head_dim=12, num_layers=1, embedding_dim=IMAGE_WIDTH
    )


def normalizer() -> Any:
    """Return a module that normalizes image embeddings for Stable unCLIP."""
    home = importlib.import_module("diffusers.pipelines.stable_diffusion.stable_unclip_image_normalizer")
    return home.StableUnCLIPImageNormalizer(embedding_dim=IMAGE_WIDTH)


def stable_unclip() -> dict[str, Any]:
    """Return the components shared by the tiny Stable unCLIP pipelines.

    The UNet receives an image embedding and its noise level.
    """
    return {
        "image_normalizer": normalizer(),
        "image_noising_scheduler": diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2"),
        "tokenizer": clip_tokenizer(),
        "text_encoder": clip_text(),
        "unet": stable_diffusion.denoiser(
            class_embed_type="projection",
            projection_class_embeddings_input_dim=2 * IMAGE_WIDTH,
            use_linear_projection=True,
        ),
        "scheduler": diffusers.DDIMScheduler(
            beta_schedule="scaled_linear",
            beta_start=0.00085,
            beta_end=0.012,
            prediction_type="v_prediction",
            clip_sample=False,
            set_alpha_to_one=False,
            steps_offset=1,
        ),
        "vae": autoencoder_kl(),
    }


def stable_unclip_from_text() -> dict[str, Any]:
    """Return the components of a tiny Stable unCLIP text-to-image pipeline, including the prior."""
    return stable_unclip() | {
        "prior_tokenizer": clip_tokenizer(),
        "prior_text_encoder": clip_text_with_projection(),
        "prior": prior(),
        "prior_scheduler": diffusers.DDPMScheduler(
            variance_type="fixed_small_log", prediction_type="sample", clip_sample=True, clip_sample_range=5.0
        ),
    }


def stable_unclip_from_image() -> dict[str, Any]:
    """Return the components of a tiny Stable unCLIP image-to-image pipeline, including the image encoder."""
    return stable_unclip() | {"feature_extractor": clip_image_processor(), "image_encoder": clip_vision()}


def unclip() -> dict[str, Any]:
    """Return the components shared by both tiny unCLIP pipelines.

    They include a decoder and two super-resolution UNets.
    """
    home = importlib.import_module("diffusers.pipelines.deprecated.unclip.text_proj")
    return {
        "decoder": diffusers.UNet2DConditionModel(
            sample_size=8,
            in_channels=3,
            out_channels=6,
            down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
            up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
            mid_block_type="UNetMidBlock2DSimpleCrossAttn",
            block_out_channels=(8, 16),
            layers_per_block=1,
            cross_attention_dim=16,
            attention_head_dim=4,
            norm_num_groups=4,
            resnet_time_scale_shift="scale_shift",
            class_embed_type="identity",
        ),
        "text_encoder": clip_text_with_projection(),
        "tokenizer": clip_tokenizer(),
        "text_proj": home.UnCLIPTextProjModel(
            clip_embeddings_dim=IMAGE_WIDTH, time_embed_dim=32, cross_attention_dim=16
        ),
        "super_res_first": enlarger(),
        "super_res_last": enlarger(),
        "decoder_scheduler": diffusers.UnCLIPScheduler(variance_type="learned_range", prediction_type="epsilon"),
        "super_res_scheduler": diffusers.UnCLIPScheduler(variance_type="fixed_small_log", prediction_type="sample"),
    }


def enlarger() -> Any:
    """Return a tiny super-resolution UNet.

    It receives the low-resolution image as additional input channels.
    """
    return diffusers.UNet2DModel(
        sample_size=SIZE,
        in_channels=6,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("ResnetDownsampleBlock2D",) * 2,
        up_block_types=("ResnetUpsampleBlock2D",) * 2,
    )


def unclip_from_text() -> dict[str, Any]:
    """Return the components of a tiny unCLIP text-to-image pipeline, including the prior."""
    schedule = diffusers.UnCLIPScheduler(
        variance_type="fixed_small_log", prediction_type="sample", clip_sample_range=5.0
    )
    return unclip() | {"prior": prior(), "prior_scheduler": schedule}


def unclip_from_image() -> dict[str, Any]:
    """Return the components of a tiny unCLIP image variation pipeline, including the image encoder."""
    return unclip() | {"feature_extractor": clip_image_processor(), "image_encoder": clip_vision()}


def call_unclip(**more: Any) -> dict[str, Any]:
    """Return call arguments with separate step counts for the decoder and the super-resolution UNets."""
    arguments = unprompted(decoder_num_inference_steps=2, super_res_num_inference_steps=2, **more)
    del arguments["num_inference_steps"]
    return arguments


RECIPES = (
    recipe(
        name="stable-unclip",
        pipeline="StableUnCLIPPipeline",
        parts=stable_unclip_from_text,
        call=lambda: prompted(height=SIZE, width=SIZE, prior_num_inference_steps=2),
    ),
    recipe(
        name="stable-unclip-image-to-image",
        pipeline="StableUnCLIPImg2ImgPipeline",
        parts=stable_unclip_from_image,
        call=lambda: prompted(image=make_image(SIZE), height=SIZE, width=SIZE),
    ),
    recipe(
        name="unclip",
        pipeline="UnCLIPPipeline",
        parts=unclip_from_text,
        call=lambda: call_unclip(prompt="a red fox", prior_num_inference_steps=2),
    ),
    recipe(
        name="unclip-image-variation",
        pipeline="UnCLIPImageVariationPipeline",
        parts=unclip_from_image,
        call=lambda: call_unclip(image=make_image(SIZE)),
    ),
)
