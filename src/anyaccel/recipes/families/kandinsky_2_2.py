"""Recipes for tiny Kandinsky 2.2 pipelines.

They cover the prior, the decoder, image-to-image, inpainting, ControlNet and the combined
pipelines.
"""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.autoencoders import movq
from anyaccel.recipes.parts.calls import embedding, make_image, mask, prompted, unprompted
from anyaccel.recipes.parts.image_encoders import IMAGE_WIDTH, clip_image_processor, clip_vision
from anyaccel.recipes.parts.text_encoders import clip_text_with_projection
from anyaccel.recipes.parts.tokenizers import clip_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16

recipe = functools.partial(make_recipe, family="kandinsky-2-2")


def denoiser(**more: Any) -> Any:
    """Return a tiny Kandinsky UNet, which is conditioned on an image embedding."""
    return diffusers.UNet2DConditionModel(
        **{
            "in_channels": 4,
            "out_channels": 8,  # the noise and its variance
            "addition_embed_type": "image",
            "encoder_hid_dim": IMAGE_WIDTH,
            "encoder_hid_dim_type": "image_proj",
            "cross_attention_dim": 16,
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
            "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
            "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
            "resnet_time_scale_shift": "scale_shift",
            "attention_head_dim": 4,
            "norm_num_groups": 4,
        }
        | more
    )


def decoder(**more: Any) -> dict[str, Any]:
    """Return the components of a tiny decoder pipeline, which generates an image from an image embedding."""
    return {
        "unet": denoiser(),
        "scheduler": diffusers.DDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="linear",
            clip_sample=False,
            set_alpha_to_one=False,
            steps_offset=1,
            prediction_type="epsilon",
            thresholding=False,
        ),
        "movq": movq(),
    } | more


def prior() -> dict[str, Any]:
    """Return the components of a tiny prior pipeline, which maps a prompt to an image embedding."""
    return {
        "prior": diffusers.PriorTransformer(
            num_attention_heads=2, attention_head_dim=12, num_layers=1, embedding_dim=IMAGE_WIDTH
        ),
        "image_encoder": clip_vision(),
        "text_encoder": clip_text_with_projection(),
        "tokenizer": clip_tokenizer(),
        "scheduler": diffusers.UnCLIPScheduler(
            variance_type="fixed_small_log", prediction_type="sample", clip_sample=True, clip_sample_range=5.0
        ),
        "image_processor": clip_image_processor(),
    }


def both() -> dict[str, Any]:
    """Return the components of a tiny combined pipeline: those of the prior and of the decoder."""
    return decoder() | {f"prior_{name}": part for name, part in prior().items()}


def call_prior(**more: Any) -> dict[str, Any]:
    """Return call arguments for the prior, with a prompt, guidance and two steps."""
    return prompted(**more)


def call_decoder(**more: Any) -> dict[str, Any]:
    """Return call arguments for the decoder, with random embeddings instead of the prior's output."""
    return (
        unprompted(
            image_embeds=embedding(1, IMAGE_WIDTH),
            negative_image_embeds=embedding(1, IMAGE_WIDTH, seed=4),
            guidance_scale=4.0,
            height=SIZE,
            width=SIZE,
        )
        | more
    )


def call_both(**more: Any) -> dict[str, Any]:
    """Return call arguments for the combined pipeline, with two prior steps.

    `callback_steps` is None, because the pipeline's default value is deprecated.
    """
    return prompted(height=SIZE, width=SIZE, prior_num_inference_steps=2, callback_steps=None) | more


RECIPES = (
    recipe(name="kandinsky-2-2-prior", pipeline="KandinskyV22PriorPipeline", parts=prior, call=call_prior),
    recipe(
        name="kandinsky-2-2-prior-from-image",
        pipeline="KandinskyV22PriorEmb2EmbPipeline",
        parts=prior,
        call=lambda: call_prior(image=make_image(SIZE), strength=0.5, num_inference_steps=4),
    ),
    recipe(name="kandinsky-2-2", pipeline="KandinskyV22Pipeline", parts=decoder, call=call_decoder),
    recipe(
        name="kandinsky-2-2-image-to-image",
        pipeline="KandinskyV22Img2ImgPipeline",
        parts=decoder,
        call=lambda: call_decoder(image=make_image(SIZE), strength=0.5, num_inference_steps=4),
    ),
    recipe(
        name="kandinsky-2-2-inpaint",
        pipeline="KandinskyV22InpaintPipeline",
        parts=lambda: decoder(unet=denoiser(in_channels=9)),
        call=lambda: call_decoder(image=make_image(SIZE), mask_image=mask(SIZE)),
    ),
    recipe(
        name="kandinsky-2-2-control",
        pipeline="KandinskyV22ControlnetPipeline",
        parts=lambda: decoder(unet=denoiser(in_channels=8, addition_embed_type="image_hint")),
        call=lambda: call_decoder(hint=embedding(1, 3, 4 * SIZE, 4 * SIZE)),
    ),
    recipe(
        name="kandinsky-2-2-control-image-to-image",
        pipeline="KandinskyV22ControlnetImg2ImgPipeline",
        parts=lambda: decoder(unet=denoiser(in_channels=8, addition_embed_type="image_hint")),
        call=lambda: call_decoder(
            hint=embedding(1, 3, 4 * SIZE, 4 * SIZE), image=make_image(SIZE), strength=0.5, num_inference_steps=4
        ),
    ),
    recipe(name="kandinsky-2-2-combined", pipeline="KandinskyV22CombinedPipeline", parts=both, call=call_both),
    recipe(
        name="kandinsky-2-2-combined-image-to-image",
        pipeline="KandinskyV22Img2ImgCombinedPipeline",
        parts=both,
        call=lambda: call_both(image=make_image(SIZE), strength=0.5, num_inference_steps=4),
    ),
    recipe(
        name="kandinsky-2-2-combined-inpaint",
        pipeline="KandinskyV22InpaintCombinedPipeline",
        parts=lambda: both() | {"unet": denoiser(in_channels=9)},
        call=lambda: call_both(image=make_image(SIZE), mask_image=mask(SIZE)),
    ),
)
