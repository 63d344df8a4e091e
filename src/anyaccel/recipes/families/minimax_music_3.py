"""Recipe for a tiny MiniMax Music 3 pipeline, which is modular."""

from __future__ import annotations

from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import unprompted
from anyaccel.recipes.parts.language_models import qwen_3
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import qwen_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

# The ids of the audio tokens are constants of the pipeline: 16384 of them follow 151675 other tokens.
VOCABULARY_SIZE = 151675 + 16384
CODEBOOKS = 3
# Latent frames per second; each frame has four samples of audio.
LATENT_RATE = 50
HOP_LENGTH = 4


def parts() -> dict[str, Any]:
    """Return the components of a tiny MiniMax Music 3 pipeline.

    A language model and a depth decoder generate audio codes, and their hidden states guide the denoising of latents.
    """
    return {
        "tokenizer": qwen_tokenizer(),
        "language_model": qwen_3(vocab_size=VOCABULARY_SIZE, tie_word_embeddings=True),
        "rvq_depth_decoder": diffusers.MiniMaxMusic3RVQDepthDecoder(
            hidden_size=TEXT_WIDTH,
            num_layers=1,
            num_attention_heads=2,
            intermediate_size=37,
            audio_vocab_size=64,
            num_codebooks=CODEBOOKS,
        ),
        "condition_encoder": diffusers.MiniMaxMusic3ConditionEncoder(
            condition_hidden_dim=TEXT_WIDTH,
            num_condition_layers=CODEBOOKS,
            out_dim=16,
            output_sampling_rate=LATENT_RATE * HOP_LENGTH,
            output_hop_length=HOP_LENGTH,
        ),
        "transformer": diffusers.MiniMaxMusic3Transformer1DModel(
            in_channels=8,
            condition_dim=16,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=16,
            ff_inner_dim=64,
            rotary_dim=8,
            fourier_embedding_dim=32,
        ),
        # The transformer's time is 0 for noise and 1 for data.
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, invert_sigmas=True),
        "vocoder": diffusers.MiniMaxMusic3Vocoder(
            latent_channels=8,
            decoder_input_dim=16,
            decoder_hidden_dim=16,
            upsampling_ratios=(2, 2),
            sampling_rate=LATENT_RATE * HOP_LENGTH,
        ),
    }


RECIPES = (
    make_recipe(
        name="minimax-music-3",
        pipeline="MiniMaxMusic3ModularPipeline",
        family="audio",
        parts=parts,
        call=lambda: unprompted(output="audios", prompt="a red fox", lyrics="[verse]\nhello", audio_duration=0.2),
    ),
)
