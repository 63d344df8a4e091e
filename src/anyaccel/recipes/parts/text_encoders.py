"""Tiny text encoders: CLIP, T5, UMT5 and BERT."""

from __future__ import annotations

from typing import Any

from anyaccel.recipes.lazy_modules import transformers
from anyaccel.recipes.parts.tokenizers import BERT_VOCABULARY, CLIP_VOCABULARY, T5_VOCABULARY

__all__ = ["TEXT_WIDTH", "bert", "bert_config", "clip_text", "clip_text_with_projection", "t5_encoder", "umt5_encoder"]

# Hidden size of every text encoder and language model, so recipes can exchange them.
TEXT_WIDTH = 32


def clip_config(**more: Any) -> Any:
    """Return the configuration for a tiny CLIP text encoder with two layers of width 32."""
    return transformers.CLIPTextConfig(
        **{
            "vocab_size": len(CLIP_VOCABULARY),
            "hidden_size": TEXT_WIDTH,
            # A prime, as in the tests of transformers: no tile size of a kernel divides it.
            "intermediate_size": 37,
            "projection_dim": TEXT_WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 77,
            "bos_token_id": CLIP_VOCABULARY["<|startoftext|>"],
            "eos_token_id": CLIP_VOCABULARY["<|endoftext|>"],
            "pad_token_id": CLIP_VOCABULARY["<|endoftext|>"],
        }
        | more
    )


def clip_text(**more: Any) -> Any:
    """Return a tiny CLIP text encoder without a projection layer."""
    return transformers.CLIPTextModel(clip_config(**more))


def clip_text_with_projection(**more: Any) -> Any:
    """Return a tiny CLIP text encoder with a projection layer."""
    return transformers.CLIPTextModelWithProjection(clip_config(**more))


def t5_encoder(**more: Any) -> Any:
    """Return a tiny T5 1.1 encoder with two layers of width 32."""
    return transformers.T5EncoderModel(
        transformers.T5Config(
            **{
                "vocab_size": len(T5_VOCABULARY),
                "d_model": TEXT_WIDTH,
                "d_kv": 8,
                "d_ff": 37,
                "num_layers": 2,
                "num_heads": 4,
                # T5 1.1; the default is the ReLU of the first T5.
                "feed_forward_proj": "gated-gelu",
            }
            | more
        )
    )


def umt5_encoder(**more: Any) -> Any:
    """Return a tiny UMT5 (multilingual T5) encoder with two layers of width 32."""
    return transformers.UMT5EncoderModel(
        transformers.UMT5Config(
            **{
                "vocab_size": len(T5_VOCABULARY),
                "d_model": TEXT_WIDTH,
                "d_kv": 8,
                "d_ff": 37,
                "num_layers": 2,
                "num_heads": 4,
            }
            | more
        )
    )


def bert_config(**more: Any) -> Any:
    """Return the configuration for a tiny BERT model with two layers of width 32."""
    return transformers.BertConfig(
        **{
            "vocab_size": len(BERT_VOCABULARY),
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 37,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 77,
        }
        | more
    )


def bert(**more: Any) -> Any:
    """Return a tiny BERT encoder."""
    return transformers.BertModel(bert_config(**more))
