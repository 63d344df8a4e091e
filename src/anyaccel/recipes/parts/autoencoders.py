"""Autoencoders at their smallest."""

from __future__ import annotations

from typing import Any

from anyaccel.recipes.lazy_modules import diffusers

__all__ = ["autoencoder_kl", "movq"]


def autoencoder_kl(*, latent_channels: int = 4, **more: Any) -> Any:
    """The autoencoder of Stable Diffusion; two levels: a picture of 16 pixels has a latent of 8."""
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
    """The quantising autoencoder of Kandinsky, whose decoder is normalised by the latent."""
    return diffusers.VQModel(
        block_out_channels=(32, 32),  # its norms have 32 groups, whatever is asked
        down_block_types=("DownEncoderBlock2D", "AttnDownEncoderBlock2D"),
        up_block_types=("AttnUpDecoderBlock2D", "UpDecoderBlock2D"),
        latent_channels=4,
        vq_embed_dim=4,
        num_vq_embeddings=12,
        norm_num_groups=8,
        norm_type="spatial",
    )
