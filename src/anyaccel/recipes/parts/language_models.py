"""Tiny language models, for pipelines that use their hidden states."""

from __future__ import annotations

import importlib
from typing import Any

from anyaccel.recipes.lazy_modules import transformers
from anyaccel.recipes.parts.image_encoders import clip_vision_config, siglip_vision_config
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import GEMMA_VOCABULARY, GLM_VOCABULARY, LLAMA_VOCABULARY, QWEN_VOCABULARY

__all__ = [
    "LLAVA_IMAGE_TOKENS",
    "LLAVA_TOKENS",
    "decoder_arguments",
    "gemma",
    "gemma_2",
    "gemma_3",
    "glm",
    "llama",
    "llama_with_head",
    "llava",
    "mistral_3",
    "mistral_3_model",
    "qwen_2_5_vl",
    "qwen_2_5_vl_text",
    "qwen_2_vl",
    "qwen_3",
    "qwen_3_model",
    "qwen_3_vl",
    "qwen_3_vl_model",
    "qwen_3_vl_text",
    "smol_lm",
    "t5_gemma_2_encoder",
    "t5_gemma_encoder",
    "t5_gemma_encoder_model",
]

# Special tokens after those of the vocabulary of Llama. The first one stands for the patches of an image.
LLAVA_TOKENS = ("<image>", "<|end_header_id|>")
LLAVA_IMAGE_TOKENS = 4  # 2 x 2 patches


def decoder_arguments(vocabulary: dict[str, int], **more: Any) -> dict[str, Any]:
    """Return configuration arguments for a tiny decoder.

    It has two layers of width 32 and uses grouped-query attention.
    """
    return {
        "vocab_size": len(vocabulary),
        "hidden_size": TEXT_WIDTH,
        # A prime, as in the tests of transformers: no tile size of a kernel divides it.
        "intermediate_size": 37,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 2048,
    } | more


def _qwen_token_ids() -> dict[str, int]:
    # Some defaults are ids of the real vocabulary, outside of the tiny one: SmolLM3 pads with 128004.
    end = QWEN_VOCABULARY["<|endoftext|>"]
    return {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}


def qwen_3_config(**more: Any) -> Any:
    """Return the configuration for a tiny Qwen3 model."""
    return transformers.Qwen3Config(**decoder_arguments(QWEN_VOCABULARY, **_qwen_token_ids()) | more)


def qwen_3(**more: Any) -> Any:
    """Return a tiny Qwen3 model with its language modeling head."""
    return transformers.Qwen3ForCausalLM(qwen_3_config(**more))


def qwen_3_model(**more: Any) -> Any:
    """Return a tiny Qwen3 model without its language modeling head."""
    return transformers.Qwen3Model(qwen_3_config(**more))


def _qwen_2_5_decoder(**more: Any) -> dict[str, Any]:
    # mrope_section splits the head_dim / 2 = 4 rotary frequencies into time, height and width.
    # The names of transformers 4, which transformers 5 accepts too.
    rope = {"rope_theta": 1e6, "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    return decoder_arguments(QWEN_VOCABULARY, **_qwen_token_ids()) | rope | more


def qwen_2_5_vl_text(**more: Any) -> Any:
    """Return the text decoder of a tiny Qwen2.5-VL model, without the vision tower."""
    module = importlib.import_module("transformers.models.qwen2_5_vl")
    return module.Qwen2_5_VLTextModel(module.Qwen2_5_VLTextConfig(**_qwen_2_5_decoder(**more)))


def qwen_2_5_vl(**more: Any) -> Any:
    """Return a tiny Qwen2.5-VL model with its vision tower, which uses 14-pixel patches."""
    text = _qwen_2_5_decoder(**more)
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 37,
        "num_heads": 2,
        "out_hidden_size": TEXT_WIDTH,
        # One layer with window attention, one with full attention.
        "fullatt_block_indexes": [1],
    }
    return transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(
            text_config=text,
            vision_config=vision,
            image_token_id=QWEN_VOCABULARY["<|image_pad|>"],
            video_token_id=QWEN_VOCABULARY["<|video_pad|>"],
            vision_start_token_id=QWEN_VOCABULARY["<|vision_start|>"],
            vision_end_token_id=QWEN_VOCABULARY["<|vision_end|>"],
        )
    )


def mistral_3() -> Any:
    """Return a tiny Mistral 3 model: a Mistral decoder with a Pixtral vision tower."""
    text = transformers.MistralConfig(**decoder_arguments(QWEN_VOCABULARY, **_qwen_token_ids()))
    vision = transformers.PixtralVisionConfig(
        hidden_size=32, intermediate_size=37, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    return transformers.Mistral3ForConditionalGeneration(
        transformers.Mistral3Config(
            text_config=text, vision_config=vision, image_token_index=QWEN_VOCABULARY["<|image_pad|>"]
        )
    )


def gemma(**more: Any) -> Any:
    """Return a tiny Gemma 1 model without its language modeling head."""
    return transformers.GemmaModel(transformers.GemmaConfig(**decoder_arguments(GEMMA_VOCABULARY) | more))


def gemma_2(**more: Any) -> Any:
    """Return a tiny Gemma 2 model without its language modeling head."""
    return transformers.Gemma2Model(transformers.Gemma2Config(**decoder_arguments(GEMMA_VOCABULARY) | more))


def glm(**more: Any) -> Any:
    """Return a tiny GLM model without its language modeling head."""
    return transformers.GlmModel(
        transformers.GlmConfig(
            **decoder_arguments(
                GLM_VOCABULARY,
                pad_token_id=GLM_VOCABULARY["<|endoftext|>"],
                eos_token_id=GLM_VOCABULARY["<|endoftext|>"],
            )
            | more
        )
    )


def llama(**more: Any) -> Any:
    """Return a tiny Llama model without its language modeling head."""
    return transformers.LlamaModel(
        transformers.LlamaConfig(**decoder_arguments(LLAMA_VOCABULARY, pad_token_id=0) | more)
    )


def llama_with_head(**more: Any) -> Any:
    """Return a tiny Llama model with its language modeling head."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**decoder_arguments(LLAMA_VOCABULARY, pad_token_id=0) | more)
    )


def llava(**more: Any) -> Any:
    """Return a tiny LLaVA model: a Llama decoder with a CLIP vision tower, for a tokenizer with `LLAVA_TOKENS`."""
    text = transformers.LlamaConfig(**decoder_arguments(LLAMA_VOCABULARY, pad_token_id=0) | more)
    text.vocab_size = len(LLAMA_VOCABULARY) + len(LLAVA_TOKENS)
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            text_config=text,
            vision_config=clip_vision_config(),
            image_token_index=len(LLAMA_VOCABULARY),
            image_seq_length=LLAVA_IMAGE_TOKENS,
            pad_token_id=0,
        )
    )


def mistral_3_model() -> Any:
    """Return a tiny Mistral 3 model without its language modeling head."""
    return mistral_3().model


def smol_lm(**more: Any) -> Any:
    """Return a tiny SmolLM3 model with its language modeling head."""
    return transformers.SmolLM3ForCausalLM(
        transformers.SmolLM3Config(**decoder_arguments(QWEN_VOCABULARY, **_qwen_token_ids()) | more)
    )


def qwen_2_vl() -> Any:
    """Return a tiny Qwen2-VL model with its vision tower."""
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": TEXT_WIDTH, "num_heads": 2, "mlp_ratio": 2}
    return transformers.Qwen2VLForConditionalGeneration(
        transformers.Qwen2VLConfig(text_config=_qwen_2_5_decoder(), vision_config=vision)
    )


def t5_gemma_encoder() -> Any:
    """Return the encoder of a tiny T5Gemma model."""
    # PRX requires this class, which transformers does not export. Its argument is the config of the encoder.
    module = importlib.import_module("transformers.models.t5gemma.modeling_t5gemma")
    return module.T5GemmaEncoder(_t5_gemma_config().encoder)


def t5_gemma_encoder_model() -> Any:
    """Return a tiny T5Gemma model with only its encoder."""
    return transformers.T5GemmaEncoderModel(_t5_gemma_config(is_encoder_decoder=False))


def t5_gemma_2_encoder() -> Any:
    """Return the encoder of a tiny T5Gemma 2 model with its vision tower."""
    # dropout_rate has no default in transformers 5.22.
    text = transformers.T5Gemma2TextConfig(**decoder_arguments(GEMMA_VOCABULARY, dropout_rate=0.0))
    vision = siglip_vision_config()
    return transformers.T5Gemma2Encoder(transformers.T5Gemma2EncoderConfig(text_config=text, vision_config=vision))


def _t5_gemma_config(**more: Any) -> Any:
    module = transformers.models.t5gemma
    stack = module.T5GemmaModuleConfig(**decoder_arguments(GEMMA_VOCABULARY))
    return module.T5GemmaConfig(encoder=stack, decoder=stack, vocab_size=len(GEMMA_VOCABULARY), **more)


def _qwen_3_vl_config(**more: Any) -> Any:
    # mrope_section: see _qwen_2_5_decoder. Qwen 3 VL interleaves the three sections.
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 37,
        "num_heads": 2,
        "out_hidden_size": TEXT_WIDTH,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    }
    return transformers.Qwen3VLConfig(
        text_config=decoder_arguments(QWEN_VOCABULARY, **_qwen_token_ids()) | {"rope_parameters": rope} | more,
        vision_config=vision,
        image_token_id=QWEN_VOCABULARY["<|image_pad|>"],
        video_token_id=QWEN_VOCABULARY["<|video_pad|>"],
        vision_start_token_id=QWEN_VOCABULARY["<|vision_start|>"],
        vision_end_token_id=QWEN_VOCABULARY["<|vision_end|>"],
    )


def qwen_3_vl(**more: Any) -> Any:
    """Return a tiny Qwen3-VL model with its vision tower, which uses 16-pixel patches."""
    return transformers.Qwen3VLForConditionalGeneration(_qwen_3_vl_config(**more))


def qwen_3_vl_model(**more: Any) -> Any:
    """Return a tiny Qwen3-VL model without its language modeling head."""
    return transformers.Qwen3VLModel(_qwen_3_vl_config(**more))


def qwen_3_vl_text() -> Any:
    """Return the text decoder of a tiny Qwen3-VL model, without the vision tower."""
    return qwen_3_vl_model().language_model


def gemma_3() -> Any:
    """Return a tiny Gemma 3 model with its vision tower."""
    vision = {
        "hidden_size": 32,
        "intermediate_size": 37,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    # Four tokens per image: 2 x 2 patches of 14 pixels, without pooling.
    return transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            text_config=decoder_arguments(GEMMA_VOCABULARY), vision_config=vision, mm_tokens_per_image=4
        )
    )
