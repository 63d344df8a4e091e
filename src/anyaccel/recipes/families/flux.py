"""Recipes for tiny FLUX.1 pipelines.

They cover text-to-image, image-to-image, inpainting, Fill, Control, ControlNet, Kontext and Redux.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import make_image, mask, prompted
from anyaccel.recipes.parts.image_encoders import IMAGE_WIDTH, siglip_image_processor, siglip_vision
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, clip_text, t5_encoder
from anyaccel.recipes.parts.tokenizers import clip_tokenizer, t5_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES", "call", "flow_scheduler", "parts", "transformer_shape"]

SIZE = 16
# Values per packed latent patch: four channels, 2 x 2.
PATCH = 16

recipe = functools.partial(make_recipe, family="flux")


def transformer_shape(**more: Any) -> dict[str, Any]:
    """Return the constructor arguments shared by the transformer and its ControlNet."""
    return {
        "patch_size": 1,
        "in_channels": PATCH,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": TEXT_WIDTH,
        "pooled_projection_dim": TEXT_WIDTH,
        "axes_dims_rope": (4, 4, 8),
        "guidance_embeds": True,
    } | more


def flow_scheduler() -> Any:
    """Return the FLUX scheduler, with a timestep shift that depends on the image size."""
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)


def parts(*, in_channels: int = PATCH) -> dict[str, Any]:
    """Return the components of a tiny FLUX.1 pipeline; Control and Fill need more input channels."""
    return {
        "scheduler": flow_scheduler(),
        "vae": autoencoder_kl(
            scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False
        ),
        "text_encoder": clip_text(),
        "tokenizer": clip_tokenizer(),
        "text_encoder_2": t5_encoder(),
        "tokenizer_2": t5_tokenizer(),
        "transformer": diffusers.FluxTransformer2DModel(
            **transformer_shape(in_channels=in_channels, out_channels=PATCH)
        ),
    }


def parts_with_controlnet() -> dict[str, Any]:
    """Return the components of a tiny FLUX.1 pipeline with a ControlNet."""
    return parts() | {"controlnet": diffusers.FluxControlNetModel(**transformer_shape())}


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for a 16x16 image, with at most 32 prompt tokens."""
    return prompted(height=SIZE, width=SIZE, max_sequence_length=32) | more


def call_halfway(**more: Any) -> dict[str, Any]:
    """Return call arguments for image-to-image at strength 0.5, which runs the last two of four steps."""
    return call(image=make_image(SIZE), strength=0.5, num_inference_steps=4, **more)


def parts_of_redux() -> dict[str, Any]:
    """Return the components of a tiny FLUX.1 Redux pipeline, which converts an image to prompt embeddings."""
    encoder = importlib.import_module("diffusers.pipelines.flux.modeling_flux").ReduxImageEncoder(
        redux_dim=IMAGE_WIDTH, txt_in_features=TEXT_WIDTH
    )
    return {
        "image_encoder": siglip_vision(),
        "feature_extractor": siglip_image_processor(),
        "image_embedder": encoder,
        **{name: part for name, part in parts().items() if name.startswith(("text", "token"))},
    }


RECIPES = (
    recipe(
        name="flux-redux",
        pipeline="FluxPriorReduxPipeline",
        parts=parts_of_redux,
        call=lambda: {"image": make_image(SIZE), "prompt": "a red fox"},
    ),
    recipe(
        name="flux",
        pipeline="FluxPipeline",
        parts=parts,
        call=lambda: call(negative_prompt="blue", true_cfg_scale=2.0),
    ),
    recipe(name="flux-image-to-image", pipeline="FluxImg2ImgPipeline", parts=parts, call=call_halfway),
    recipe(
        name="flux-inpaint",
        pipeline="FluxInpaintPipeline",
        parts=parts,
        call=lambda: call_halfway(mask_image=mask(SIZE)),
    ),
    recipe(
        name="flux-fill",
        pipeline="FluxFillPipeline",
        parts=lambda: parts(in_channels=3 * PATCH),
        call=lambda: call(image=make_image(SIZE), mask_image=mask(SIZE)),
    ),
    recipe(
        name="flux-control",
        pipeline="FluxControlPipeline",
        parts=lambda: parts(in_channels=2 * PATCH),
        call=lambda: call(control_image=make_image(SIZE)),
    ),
    recipe(
        name="flux-control-image-to-image",
        pipeline="FluxControlImg2ImgPipeline",
        parts=lambda: parts(in_channels=2 * PATCH),
        call=lambda: call_halfway(control_image=make_image(SIZE, seed=2)),
    ),
    recipe(
        name="flux-control-inpaint",
        pipeline="FluxControlInpaintPipeline",
        parts=lambda: parts(in_channels=2 * PATCH),
        call=lambda: call_halfway(control_image=make_image(SIZE, seed=2), mask_image=mask(SIZE)),
    ),
    recipe(
        name="flux-kontext",
        pipeline="FluxKontextPipeline",
        parts=parts,
        call=lambda: call(image=make_image(SIZE), max_area=SIZE**2, _auto_resize=False),
    ),
    recipe(
        name="flux-kontext-inpaint",
        pipeline="FluxKontextInpaintPipeline",
        parts=parts,
        call=lambda: call_halfway(mask_image=mask(SIZE), max_area=SIZE**2, _auto_resize=False),
    ),
    recipe(
        name="flux-controlnet",
        pipeline="FluxControlNetPipeline",
        parts=parts_with_controlnet,
        call=lambda: call(control_image=make_image(SIZE)),
    ),
    recipe(
        name="flux-controlnet-image-to-image",
        pipeline="FluxControlNetImg2ImgPipeline",
        parts=parts_with_controlnet,
        call=lambda: call_halfway(control_image=make_image(SIZE, seed=2)),
    ),
    recipe(
        name="flux-controlnet-inpaint",
        pipeline="FluxControlNetInpaintPipeline",
        parts=parts_with_controlnet,
        call=lambda: call_halfway(control_image=make_image(SIZE, seed=2), mask_image=mask(SIZE)),
    ),
)
