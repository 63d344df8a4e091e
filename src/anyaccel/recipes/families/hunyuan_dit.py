"""Recipes for tiny Hunyuan-DiT pipelines: text-to-image and ControlNet."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import make_image, prompted
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, bert, t5_encoder
from anyaccel.recipes.parts.tokenizers import bert_tokenizer, t5_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES", "call", "parts", "transformer_shape"]

SIZE = 16

recipe = functools.partial(make_recipe, family="hunyuan-dit")


def transformer_shape(**more: Any) -> dict[str, Any]:
    """Return the constructor arguments shared by the transformer and its ControlNet."""
    return {
        "sample_size": SIZE // 2,
        "num_layers": 2,
        "patch_size": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 3,
        "hidden_size": 24,
        "in_channels": 4,
        "cross_attention_dim": TEXT_WIDTH,
        "cross_attention_dim_t5": TEXT_WIDTH,
        "pooled_projection_dim": 16,
    } | more


def parts(**more: Any) -> dict[str, Any]:
    """Return the components of a tiny Hunyuan-DiT pipeline, with BERT and T5 as text encoders."""
    return {
        "vae": autoencoder_kl(),
        "text_encoder": bert(),
        "tokenizer": bert_tokenizer(),
        "text_encoder_2": t5_encoder(),
        "tokenizer_2": t5_tokenizer(max_length=256),
        "transformer": diffusers.HunyuanDiT2DModel(**transformer_shape()),
        "scheduler": diffusers.DDPMScheduler(prediction_type="v_prediction", beta_schedule="scaled_linear"),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    } | more


def controlnet() -> Any:
    """Return a tiny Hunyuan-DiT ControlNet, which has half as many layers as its transformer."""
    shape = transformer_shape()
    return diffusers.HunyuanDiT2DControlNetModel(transformer_num_layers=2 * shape.pop("num_layers"), **shape)


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments that disable resolution binning, which supports only large image sizes."""
    return prompted(height=SIZE, width=SIZE, use_resolution_binning=False) | more


RECIPES = (
    recipe(name="hunyuan-dit", pipeline="HunyuanDiTPipeline", parts=parts, call=call),
    recipe(
        name="hunyuan-dit-controlnet",
        pipeline="HunyuanDiTControlNetPipeline",
        parts=lambda: parts(
            controlnet=controlnet(), transformer=diffusers.HunyuanDiT2DModel(**transformer_shape(num_layers=4))
        ),
        call=lambda: call(control_image=make_image(SIZE)),
    ),
)
