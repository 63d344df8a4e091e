"""Recipes for tiny Kandinsky 5.0 pipelines: text-to-image, image-to-image, text-to-video and image-to-video."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families.hunyuan_video import autoencoder_hunyuan
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import make_image, prompted
from anyaccel.recipes.parts.language_models import qwen_2_5_vl
from anyaccel.recipes.parts.processors import qwen_2_vl_processor
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, clip_text
from anyaccel.recipes.parts.tokenizers import clip_tokenizer, qwen_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES", "parts"]

SIZE = 32

recipe = functools.partial(make_recipe, family="kandinsky-5")


def parts(*, vae: Any, visual_cond: bool, **more: Any) -> dict[str, Any]:
    """Return the components of a tiny Kandinsky 5.0 pipeline with the given VAE.

    The text encoders are Qwen2.5-VL and CLIP. `visual_cond` is set for the pipelines that receive an image or a video.
    """
    return {
        "transformer": diffusers.Kandinsky5Transformer3DModel(
            in_visual_dim=4,
            in_text_dim=TEXT_WIDTH,
            in_text_dim2=TEXT_WIDTH,
            time_dim=32,
            out_visual_dim=4,
            patch_size=(1, 2, 2),
            model_dim=32,
            ff_dim=64,
            num_text_blocks=1,
            num_visual_blocks=2,
            axes_dims=(4, 6, 6),
            visual_cond=visual_cond,
        ),
        "vae": vae,
        "text_encoder": qwen_2_5_vl(),
        "tokenizer": qwen_tokenizer(),
        "text_encoder_2": clip_text(),
        "tokenizer_2": clip_tokenizer(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
    } | more


def parts_of_editing() -> dict[str, Any]:
    """Return the components of a tiny image-to-image pipeline, which also shows the image to the text encoder."""
    # The pipeline assumes 8x compression.
    vae = autoencoder_kl(
        block_out_channels=(8,) * 4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
    )
    return parts(vae=vae, visual_cond=True, tokenizer=qwen_2_vl_processor())


def allow_small_sizes(pipe: Any) -> None:
    """Allow small images; by default, the pipeline accepts only a few high resolutions."""
    pipe.resolutions = [(SIZE, SIZE)]


RECIPES = (
    recipe(
        # The first four latent frames are normalized with the next ones, so at least five are required.
        name="kandinsky-5-image-to-video",
        pipeline="Kandinsky5I2VPipeline",
        parts=lambda: parts(vae=autoencoder_hunyuan(), visual_cond=True),
        call=lambda: prompted(image=make_image(SIZE), negative_prompt="blue", height=SIZE, width=SIZE, num_frames=17),
    ),
    recipe(
        name="kandinsky-5-image",
        finish=allow_small_sizes,
        pipeline="Kandinsky5T2IPipeline",
        parts=lambda: parts(vae=autoencoder_kl(), visual_cond=False),
        call=lambda: prompted(negative_prompt="blue", height=SIZE, width=SIZE),
    ),
    recipe(
        name="kandinsky-5-image-to-image",
        finish=allow_small_sizes,
        pipeline="Kandinsky5I2IPipeline",
        parts=parts_of_editing,
        call=lambda: prompted(image=make_image(SIZE), negative_prompt="blue", height=SIZE, width=SIZE),
    ),
    recipe(
        name="kandinsky-5-video",
        pipeline="Kandinsky5T2VPipeline",
        parts=lambda: parts(vae=autoencoder_hunyuan(), visual_cond=True),
        call=lambda: prompted(negative_prompt="blue", height=SIZE, width=SIZE, num_frames=5),
    ),
)
