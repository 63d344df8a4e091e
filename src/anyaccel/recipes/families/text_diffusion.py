"""Recipes for tiny pipelines that generate text by denoising blocks of tokens: LLaDA 2 and DiffusionGemma."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers, transformers
from anyaccel.recipes.parts.calls import generator
from anyaccel.recipes.parts.language_models import decoder_arguments
from anyaccel.recipes.parts.text_encoders import bert_config
from anyaccel.recipes.parts.tokenizers import GEMMA_VOCABULARY, bert_tokenizer, gemma_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

BLOCK = 8

recipe = functools.partial(make_recipe, family="text-diffusion")

CHAT_TEMPLATE = """\
{{ bos_token }}{% for message in messages -%}
{{ message.role }}
{{ message.content }}
{% endfor -%}
{%- if add_generation_prompt %}model
{% endif -%}
"""


def llada_2() -> dict[str, Any]:
    """Return the components of a tiny LLaDA 2 pipeline.

    The code of the real model is part of its repository. BERT has the same interface and also predicts masked tokens.
    """
    return {
        "model": transformers.BertForMaskedLM(bert_config()),
        "scheduler": diffusers.BlockRefinementScheduler(block_length=BLOCK),
        "tokenizer": bert_tokenizer(),
    }


def diffusion_gemma() -> dict[str, Any]:
    """Return the components of a tiny DiffusionGemma pipeline, with a tokenizer as its processor.

    The model is an encoder for the prompt and a decoder for a canvas of tokens. Both have experts.
    """
    text = decoder_arguments(
        GEMMA_VOCABULARY,
        layer_types=["sliding_attention", "full_attention"],
        global_head_dim=8,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=16,
        # Otherwise the configuration adds the default frequencies of larger heads.
        pad_token_id=GEMMA_VOCABULARY["<pad>"],
        eos_token_id=GEMMA_VOCABULARY["<eos>"],
        bos_token_id=GEMMA_VOCABULARY["<bos>"],
    )
    vision = {
        "hidden_size": 32,
        "intermediate_size": 37,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    return {
        "model": transformers.DiffusionGemmaForBlockDiffusion(
            transformers.DiffusionGemmaConfig(
                text_config=text,
                vision_config={"model_type": "gemma4_vision"} | vision,
                image_token_id=GEMMA_VOCABULARY["<mask>"],
                canvas_length=BLOCK,
            )
        ),
        "scheduler": diffusers.BlockRefinementScheduler(block_length=BLOCK),
        "processor": gemma_tokenizer(chat_template=CHAT_TEMPLATE),
    }


def call() -> dict[str, Any]:
    """Return call arguments for two blocks of tokens."""
    return {
        "prompt": "a red fox",
        "gen_length": 2 * BLOCK,
        "num_inference_steps": 2,
        "generator": generator(),
        "output_type": "seq",
    }


RECIPES = (
    recipe(name="llada-2", pipeline="LLaDA2Pipeline", parts=llada_2, call=call),
    recipe(name="diffusion-gemma", pipeline="DiffusionGemmaPipeline", parts=diffusion_gemma, call=call),
)
