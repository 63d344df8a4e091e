"""Recipes for tiny AudioLDM, AudioLDM 2 and MusicLDM pipelines."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers, transformers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import embedding, prompted
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, t5_encoder
from anyaccel.recipes.parts.tokenizers import ROBERTA_VOCABULARY, roberta_tokenizer, t5_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

MEL_BINS = 8

recipe = functools.partial(make_recipe, family="audio")


def clap_text_config() -> Any:
    """Return the configuration for a tiny CLAP text encoder with two layers of width 32."""
    return transformers.ClapTextConfig(
        vocab_size=len(ROBERTA_VOCABULARY),
        hidden_size=TEXT_WIDTH,
        intermediate_size=37,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=90,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
    )


def clap() -> Any:
    """Return a tiny CLAP model, which embeds audio and text."""
    sound = transformers.ClapAudioConfig(
        spec_size=16,
        window_size=4,
        num_mel_bins=4,
        intermediate_size=37,
        layer_norm_epsilon=1e-05,
        depths=[1, 1],
        num_attention_heads=[1, 1],
        num_hidden_layers=2,
        hidden_size=192,
        projection_dim=TEXT_WIDTH,
        patch_size=2,
        patch_stride=2,
        patch_embed_input_channels=4,
    )
    return transformers.ClapModel(
        transformers.ClapConfig(
            # transformers 4 accepts only dicts.
            text_config=clap_text_config().to_dict(),
            audio_config=sound.to_dict(),
            projection_dim=TEXT_WIDTH,
        )
    )


def vocoder() -> Any:
    """Return a tiny HiFi-GAN vocoder, which converts a spectrogram to audio."""
    return transformers.SpeechT5HifiGan(
        transformers.SpeechT5HifiGanConfig(
            model_in_dim=MEL_BINS,
            sampling_rate=16000,
            upsample_initial_channel=16,
            upsample_rates=[2, 2],
            upsample_kernel_sizes=[4, 4],
            resblock_kernel_sizes=[3, 7],
            resblock_dilation_sizes=[[1, 3, 5], [1, 3, 5]],
            normalize_before=False,
        )
    )


def denoiser() -> Any:
    """Return a tiny AudioLDM UNet, which receives the text only as a class embedding."""
    return diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=(8, 16),
        class_embed_type="simple_projection",
        projection_class_embeddings_input_dim=TEXT_WIDTH,
        class_embeddings_concat=True,
        attention_head_dim=4,
        norm_num_groups=4,
    )


def scheduler() -> Any:
    """Return the DDIM scheduler for AudioLDM and AudioLDM 2."""
    return diffusers.DDIMScheduler(
        beta_start=0.0015, beta_end=0.0195, beta_schedule="scaled_linear", clip_sample=False, steps_offset=1
    )


def audio_ldm() -> dict[str, Any]:
    """Return the components of a tiny AudioLDM pipeline."""
    return {
        "vae": autoencoder_kl(in_channels=1, out_channels=1),
        "text_encoder": transformers.ClapTextModelWithProjection(clap_text_config()),
        "tokenizer": roberta_tokenizer(),
        "unet": denoiser(),
        "scheduler": scheduler(),
        "vocoder": vocoder(),
    }


def music_ldm() -> dict[str, Any]:
    """Return the components of a tiny MusicLDM pipeline, which can rank several waveforms with CLAP."""
    return audio_ldm() | {
        "text_encoder": clap(),
        "feature_extractor": transformers.ClapFeatureExtractor(feature_size=4, hop_length=8000),
    }


def audio_ldm_2() -> dict[str, Any]:
    """Return the components of a tiny AudioLDM 2 pipeline.

    A GPT-2 model maps CLAP and T5 embeddings to the context for the UNet's cross-attention.
    """
    home = importlib.import_module("diffusers.pipelines.audioldm2.modeling_audioldm2")
    language = transformers.GPT2Config(
        n_embd=16,
        n_head=4,
        n_layer=2,
        n_ctx=99,
        n_positions=99,
        vocab_size=10,
        bos_token_id=0,
        eos_token_id=1,
        max_new_tokens=4,
    )
    return audio_ldm() | {
        "text_encoder": clap(),
        "feature_extractor": transformers.ClapFeatureExtractor(feature_size=4, hop_length=8000),
        "text_encoder_2": t5_encoder(),
        "tokenizer_2": t5_tokenizer(max_length=77),
        "projection_model": home.AudioLDM2ProjectionModel(
            text_encoder_dim=TEXT_WIDTH, text_encoder_1_dim=TEXT_WIDTH, langauge_model_dim=16
        ),
        "language_model": transformers.GPT2LMHeadModel(language),
        "unet": home.AudioLDM2UNet2DConditionModel(
            block_out_channels=(8, 16),
            layers_per_block=1,
            in_channels=4,
            out_channels=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=((None, 16, TEXT_WIDTH), (None, 16, TEXT_WIDTH)),
            attention_head_dim=4,
            norm_num_groups=4,
        ),
    }


def call() -> dict[str, Any]:
    """Return call arguments for one millisecond of audio."""
    return prompted(audio_length_in_s=0.001)


def call_with_embeddings() -> dict[str, Any]:
    """Return call arguments with prompt embeddings instead of a prompt.

    diffusers 0.42 expects the text features of CLAP as a tensor, which transformers 5 no longer returns.
    """
    return call() | {
        "prompt": None,
        "prompt_embeds": embedding(1, TEXT_WIDTH),
        "negative_prompt_embeds": embedding(1, TEXT_WIDTH, seed=4),
    }


RECIPES = (
    recipe(name="audio-ldm", pipeline="AudioLDMPipeline", parts=audio_ldm, call=call),
    recipe(name="audio-ldm-2", pipeline="AudioLDM2Pipeline", parts=audio_ldm_2, call=call),
    recipe(name="music-ldm", pipeline="MusicLDMPipeline", parts=music_ldm, call=call_with_embeddings),
)
