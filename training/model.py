"""Components of the embedded model: diffusers and transformers classes, small enough for a CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DPMSolverMultistepScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

from training.captions import IMAGE_PIXELS
from training.tokenizer import MAX_TOKENS

__all__ = [
    "LATENT_CHANNELS",
    "LATENT_SIDE",
    "assemble",
    "make_autoencoder",
    "make_denoiser",
    "make_scheduler",
    "make_text_encoder",
    "save",
]

LATENT_CHANNELS = 8
LATENT_SIDE = IMAGE_PIXELS // 8
_TEXT_WIDTH = 192


def make_autoencoder() -> Any:
    """Return the autoencoder: 128 × 128 pixels to 16 × 16 × 8 latents."""
    return AutoencoderKL(
        sample_size=IMAGE_PIXELS,
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(32, 64, 96, 128),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        norm_num_groups=8,
        mid_block_add_attention=False,
        scaling_factor=1.0,
    )


def make_text_encoder(tokenizer: Any) -> Any:
    """Return the text encoder: four layers, enough for short captions."""
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=_TEXT_WIDTH,
            intermediate_size=4 * _TEXT_WIDTH,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=MAX_TOKENS,
            projection_dim=_TEXT_WIDTH,
            pad_token_id=tokenizer.pad_token_id,
            **ends,
        )
    )


def make_denoiser() -> Any:
    """Return the denoiser: two levels, 16 × 16 and 8 × 8, both with cross-attention."""
    return UNet2DConditionModel(
        sample_size=LATENT_SIDE,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        block_out_channels=(160, 192),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=_TEXT_WIDTH,
        attention_head_dim=(
            5,
            6,
        ),  # the number of heads, despite the name: https://github.com/huggingface/diffusers/issues/2011
        norm_num_groups=16,
    )


def make_scheduler() -> Any:
    """Return the scheduler: v-prediction with zero terminal SNR, which allows backgrounds of any color."""
    return DPMSolverMultistepScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        algorithm_type="dpmsolver++",
        solver_order=2,
        steps_offset=1,  # diffusers warns about other values for Stable Diffusion; trailing spacing ignores it
    )


def assemble(autoencoder: Any, text_encoder: Any, tokenizer: Any, denoiser: Any) -> Any:
    """Return the diffusers pipeline."""
    return StableDiffusionPipeline(
        vae=autoencoder,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=denoiser,
        scheduler=make_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def save(pipe: Any, folder: Path, shard: str = "10GB") -> None:
    """Save a pipeline as float16 safetensors, without the paths of this machine."""
    shutil.rmtree(folder, ignore_errors=True)
    pipe.to(torch.float16).save_pretrained(folder, safe_serialization=True, max_shard_size=shard)
    for path in folder.rglob("*.json"):
        config = json.loads(path.read_text(encoding="utf-8"))
        if config.pop("_name_or_path", None) is not None:
            _write(path, config)
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes files that only their owner can read
    # Otherwise transformers loads the text encoder in float16, while diffusers loads the others in float32.
    config_path = folder / "text_encoder" / "config.json"
    _write(config_path, json.loads(config_path.read_text(encoding="utf-8")) | {"dtype": "float32"})


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
