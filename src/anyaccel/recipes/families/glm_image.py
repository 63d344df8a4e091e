"""Recipe for a tiny GLM-Image pipeline."""

from __future__ import annotations

from typing import Any

from anyaccel.recipes.families.hunyuan_image import byt5
from anyaccel.recipes.lazy_modules import diffusers, transformers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import prompted
from anyaccel.recipes.parts.language_models import decoder_arguments
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import GLM_IMAGE_CODES, GLM_IMAGE_VOCABULARY, glm_image_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

# The language model writes one code per 32 x 32 pixels, so this is 2 x 2 codes.
SIZE = 64
PATCH = 16
CHANNELS = 4

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- for part in message.content -%}
{% if part.type == "image" %}<|image|>{% else %}{{ part.text }}{% endif %}
{%- endfor -%}
{%- endfor -%}
"""


def language_model() -> Any:
    """Return a tiny GLM-Image language model, which writes the codes of an image one after the other.

    Its vision tower and its codebook convert an image to codes.
    """
    end = GLM_IMAGE_VOCABULARY["<|dit_token_16385|>"]
    # mrope_section splits the head_dim / 2 = 4 rotary frequencies into time, height and width.
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}
    text = decoder_arguments(
        GLM_IMAGE_VOCABULARY,
        # One layer, because the model also writes 256 codes for a preview.
        num_hidden_layers=1,
        # Without the end token, which would end the image after a random number of codes.
        vision_vocab_size=GLM_IMAGE_CODES,
        pad_token_id=GLM_IMAGE_VOCABULARY["<|endoftext|>"],
        eos_token_id=end,
        rope_parameters=rope,
    )
    vision = {
        "depth": 1,
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 37,
        "num_heads": 2,
        "image_size": SIZE,
        "patch_size": PATCH,
    }
    codebook = {"embed_dim": 8, "num_embeddings": GLM_IMAGE_CODES, "latent_channels": TEXT_WIDTH}
    return transformers.GlmImageForConditionalGeneration(
        transformers.GlmImageConfig(
            text_config=text,
            vision_config=vision,
            vq_config=codebook,
            image_token_id=GLM_IMAGE_VOCABULARY["<|image|>"],
            image_start_token_id=GLM_IMAGE_VOCABULARY["<|dit_token_16384|>"],
            image_end_token_id=end,
        )
    )


def parts() -> dict[str, Any]:
    """Return the components of a tiny GLM-Image pipeline: a language model and a transformer that denoises."""
    glyphs = byt5()
    pixels = SIZE * SIZE
    return {
        "tokenizer": glyphs["tokenizer_2"],
        "processor": transformers.GlmImageProcessor(
            # The default image processor requires torchvision.
            transformers.GlmImageImageProcessorPil(
                size={"shortest_edge": pixels, "longest_edge": pixels},
                patch_size=PATCH,
                temporal_patch_size=1,
                merge_size=1,
            ),
            glm_image_tokenizer(),
            chat_template=CHAT_TEMPLATE,
        ),
        "text_encoder": glyphs["text_encoder_2"],
        "vision_language_encoder": language_model(),
        # 8x compression and patches of 2 x 2 latents: four times as many tokens as codes.
        "vae": autoencoder_kl(
            latent_channels=CHANNELS,
            block_out_channels=(8,) * 4,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            latents_mean=[0.0] * CHANNELS,
            latents_std=[1.0] * CHANNELS,
        ),
        "transformer": diffusers.GlmImageTransformer2DModel(
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            text_embed_dim=TEXT_WIDTH,
            time_embed_dim=32,
            condition_dim=8,
            prior_vq_quantizer_codebook_size=GLM_IMAGE_CODES,
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
    }


RECIPES = (
    make_recipe(
        name="glm-image",
        pipeline="GlmImagePipeline",
        family="glm-image",
        parts=parts,
        # Without a condition image: diffusers 0.42 passes its features to transformers 5.22 in the wrong shape.
        call=lambda: prompted(prompt='a fox that says "hi"', height=SIZE, width=SIZE),
    ),
)
