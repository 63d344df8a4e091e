"""Tiny image autoencoders that several recipes use."""

from __future__ import annotations

from typing import Any

from anyaccel.recipes.lazy_modules import diffusers

__all__ = ["autoencoder_kl", "movq"]


def autoencoder_kl(*, latent_channels: int = 4, **more: Any) -> Any:
    """Return a tiny Stable Diffusion autoencoder, which encodes a 16x16 image as 8x8 latents."""
    return diffusers.AutoencoderKL(
        **{
            "latent_channels": latent_channels,
            "block_out_channels": (8, 16),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "norm_num_groups": 4,
        }
        | more
    )


def movq() -> Any:
    """Return a tiny MoVQ autoencoder for Kandinsky, with decoder norms conditioned on the latents."""
    return diffusers.VQModel(
        block_out_channels=(32, 32),  # SpatialNorm always has 32 groups, whatever norm_num_groups is
        down_block_types=("DownEncoderBlock2D", "AttnDownEncoderBlock2D"),
        up_block_types=("AttnUpDecoderBlock2D", "UpDecoderBlock2D"),
        latent_channels=4,
        vq_embed_dim=4,
        num_vq_embeddings=12,
        norm_num_groups=8,
        norm_type="spatial",
    )
