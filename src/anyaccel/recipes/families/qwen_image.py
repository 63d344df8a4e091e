"""Recipes for tiny Qwen-Image pipelines: text-to-image, image-to-image, inpainting, ControlNet, editing and layers."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families.flux import flow_scheduler
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, mask, prompted, unprompted
from anyaccel.recipes.parts.language_models import qwen_2_5_vl, qwen_3_vl
from anyaccel.recipes.parts.processors import qwen_2_vl_processor, qwen_3_vl_processor
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import qwen_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES", "autoencoder_qwen"]

SIZE = 16
EDIT_SIZE = 128
CHANNELS = 4

recipe = functools.partial(make_recipe, family="qwen-image")


def autoencoder_qwen(**more: Any) -> Any:
    """Return a tiny Qwen-Image autoencoder, a video autoencoder that encodes an image as one frame."""
    return diffusers.AutoencoderKLQwenImage(
        **{
            "base_dim": 8,
            "z_dim": CHANNELS,
            "dim_mult": [1, 2],
            "num_res_blocks": 1,
            "temperal_downsample": [False],
            "latents_mean": [0.0] * CHANNELS,
            "latents_std": [1.0] * CHANNELS,
        }
        | more
    )


def transformer_shape(**more: Any) -> dict[str, Any]:
    """Return the constructor arguments shared by the transformer and its ControlNet."""
    return {
        "patch_size": 2,
        "in_channels": 4 * CHANNELS,
        "out_channels": CHANNELS,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": TEXT_WIDTH,
        "axes_dims_rope": (4, 6, 6),
    } | more


def parts(**more: Any) -> dict[str, Any]:
    """Return the components of a tiny Qwen-Image pipeline."""
    return {
        "scheduler": flow_scheduler(),
        "vae": autoencoder_qwen(),
        "text_encoder": qwen_2_5_vl(),
        "tokenizer": qwen_tokenizer(),
        "transformer": diffusers.QwenImageTransformer2DModel(**transformer_shape()),
    } | more


def parts_with_controlnet(**more: Any) -> dict[str, Any]:
    """Return the components of a tiny Qwen-Image pipeline with a ControlNet."""
    return parts(controlnet=diffusers.QwenImageControlNetModel(**transformer_shape(**more)))


def parts_of_edit(**more: Any) -> dict[str, Any]:
    """Return the components of a tiny pipeline for editing, which also shows the image to the text encoder."""
    # The pipelines resize the image to about a million pixels. With 32x compression, that is 256 tokens. Without
    # residual blocks, the encoder takes a second instead of six.
    shape = {"base_dim": 4, "dim_mult": [1] * 6, "num_res_blocks": 0, "temperal_downsample": [False] * 5}
    vae = autoencoder_qwen(**shape | more)
    return parts(processor=qwen_2_vl_processor(), vae=vae)


def parts_of_layers() -> dict[str, Any]:
    """Return the components of a tiny pipeline that splits an image into layers with transparency."""
    # The pipeline takes an image with as many channels as the latents have for latents.
    channels = 2 * CHANNELS
    # Two base channels, because the pipeline decodes 640x640 pixels for every layer.
    vae = {
        "input_channels": 4,
        "base_dim": 2,
        "z_dim": channels,
        "latents_mean": [0.0] * channels,
        "latents_std": [1.0] * channels,
    }
    transformer = diffusers.QwenImageTransformer2DModel(
        **transformer_shape(
            in_channels=4 * channels, out_channels=channels, use_additional_t_cond=True, use_layer3d_rope=True
        )
    )
    return parts_of_edit(**vae) | {"transformer": transformer}


def parts_of_2_1() -> dict[str, Any]:
    """Return the components of a tiny Qwen-Image 2.1 pipeline, with a residual autoencoder and Qwen3-VL.

    The transformer caches the keys and values of the prompt and the condition image.
    """
    return {
        "scheduler": flow_scheduler(),
        "vae": diffusers.AutoencoderKLQwenImage21(
            base_dim=8,
            decoder_base_dim=8,
            z_dim=CHANNELS,
            # The pipeline assumes 16x compression.
            dim_mult=[1] * 5,
            num_res_blocks=1,
            temperal_downsample=[False] * 4,
            latents_mean=[0.0] * CHANNELS,
            latents_std=[1.0] * CHANNELS,
        ),
        "text_encoder": qwen_3_vl(),
        "processor": qwen_3_vl_processor(),
        "transformer": diffusers.QwenImage21Transformer2DModel(
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            context_in_dim=TEXT_WIDTH,
            axes_dims_rope=(4, 6, 6),
        ),
    }


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for a 16x16 image, with a negative prompt and classifier-free guidance."""
    return (
        prompted(
            negative_prompt="blue",
            true_cfg_scale=2.0,
            guidance_scale=None,
            height=SIZE,
            width=SIZE,
            max_sequence_length=300,
        )
        | more
    )


def call_halfway(**more: Any) -> dict[str, Any]:
    """Return call arguments for image-to-image at strength 0.5, which runs the last two of four steps."""
    return call(image=make_image(SIZE), strength=0.5, num_inference_steps=4, **more)


def call_edit(**more: Any) -> dict[str, Any]:
    """Return call arguments for editing, with a width and height of two tokens."""
    return call(image=make_image(EDIT_SIZE), height=EDIT_SIZE, width=EDIT_SIZE, **more)


def call_layers() -> dict[str, Any]:
    """Return call arguments for extracting one layer of an image."""
    arguments = call(image=make_image(EDIT_SIZE).convert("RGBA"), layers=1)
    # The pipeline chooses the size of the layers.
    return {name: value for name, value in arguments.items() if name not in ("height", "width")}


RECIPES = (
    recipe(name="qwen-image", pipeline="QwenImagePipeline", parts=parts, call=call),
    recipe(name="qwen-image-image-to-image", pipeline="QwenImageImg2ImgPipeline", parts=parts, call=call_halfway),
    recipe(
        name="qwen-image-inpaint",
        pipeline="QwenImageInpaintPipeline",
        parts=parts,
        call=lambda: call_halfway(mask_image=mask(SIZE)),
    ),
    recipe(
        name="qwen-image-controlnet",
        pipeline="QwenImageControlNetPipeline",
        parts=parts_with_controlnet,
        call=lambda: call(control_image=make_image(SIZE)),
    ),
    recipe(
        name="qwen-image-controlnet-inpaint",
        pipeline="QwenImageControlNetInpaintPipeline",
        parts=lambda: parts_with_controlnet(extra_condition_channels=4),
        call=lambda: call(control_image=make_image(SIZE), control_mask=mask(SIZE)),
    ),
    recipe(
        name="qwen-image-2-1",
        pipeline="QwenImage21Pipeline",
        parts=parts_of_2_1,
        # The text encoder shows a quarter of the latents' positions, and its processor always returns four tokens.
        call=lambda: unprompted(
            prompt="a red fox", negative_prompt="blue", image=make_image(64), true_cfg_scale=2.0, output_resolution=64
        ),
    ),
    recipe(name="qwen-image-edit", pipeline="QwenImageEditPipeline", parts=parts_of_edit, call=call_edit),
    recipe(
        name="qwen-image-edit-inpaint",
        pipeline="QwenImageEditInpaintPipeline",
        parts=parts_of_edit,
        # The output has a million pixels, too, and decoding them takes seconds.
        call=lambda: call_edit(mask_image=mask(EDIT_SIZE), strength=0.5, num_inference_steps=4, output_type="latent"),
    ),
    recipe(name="qwen-image-edit-plus", pipeline="QwenImageEditPlusPipeline", parts=parts_of_edit, call=call_edit),
    recipe(name="qwen-image-layered", pipeline="QwenImageLayeredPipeline", parts=parts_of_layers, call=call_layers),
)
