"""Recipes for tiny pipelines without a prompt.

They cover DDPM, DDIM, PNDM, score-based models, latent diffusion, consistency models, DiT, RePaint
and Dance Diffusion.
"""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import make_image, mask, unprompted
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 8

recipe = functools.partial(make_recipe, family="unconditional")


def denoiser(**more: Any) -> Any:
    """Return a tiny UNet with two levels; the lower level has attention."""
    return diffusers.UNet2DModel(
        **{
            "sample_size": SIZE,
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 4,
            "norm_num_groups": 4,
        }
        | more
    )


def consistency() -> dict[str, Any]:
    """Return the components of a tiny class-conditional consistency model."""
    return {
        "unet": denoiser(num_class_embeds=10),
        "scheduler": diffusers.CMStochasticIterativeScheduler(num_train_timesteps=40, sigma_min=0.002, sigma_max=80.0),
    }


def dit() -> dict[str, Any]:
    """Return the components of a tiny DiT pipeline with 1,000 classes."""
    return {
        "transformer": diffusers.DiTTransformer2DModel(
            sample_size=SIZE,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=8,
            norm_elementwise_affine=False,
        ),
        "vae": autoencoder_kl(),
        "scheduler": diffusers.DDIMScheduler(),
    }


def latent_diffusion() -> dict[str, Any]:
    """Return the components of a tiny unconditional latent diffusion pipeline."""
    return {
        "vqvae": diffusers.VQModel(
            block_out_channels=(8, 16),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=3,
            norm_num_groups=4,
        ),
        "unet": denoiser(),
        "scheduler": diffusers.DDIMScheduler(),
    }


def super_resolution() -> dict[str, Any]:
    """Return the components of a tiny latent super-resolution pipeline.

    The UNet also receives the low-resolution image.
    """
    return latent_diffusion() | {"unet": denoiser(in_channels=6, out_channels=3)}


def dance_diffusion() -> dict[str, Any]:
    """Return the components of a tiny Dance Diffusion pipeline, which generates audio."""
    return {
        "unet": diffusers.UNet1DModel(
            block_out_channels=(32, 32, 64),
            extra_in_channels=64,
            sample_size=64,
            sample_rate=64,
            in_channels=2,
            out_channels=2,
            flip_sin_to_cos=True,
            use_timestep_embedding=False,
            time_embedding_type="fourier",
            mid_block_type="UNetMidBlock1D",
            down_block_types=("DownBlock1DNoSkip", "DownBlock1D", "AttnDownBlock1D"),
            up_block_types=("AttnUpBlock1D", "UpBlock1D", "UpBlock1DNoSkip"),
        ),
        "scheduler": diffusers.IPNDMScheduler(),
    }


def call_dance() -> dict[str, Any]:
    """Return call arguments for four seconds of audio at 64 samples per second."""
    arguments = unprompted(audio_length_in_s=4.0)
    del arguments["output_type"]
    return arguments


RECIPES = (
    recipe(
        name="pndm",
        pipeline="PNDMPipeline",
        parts=lambda: {"unet": denoiser(), "scheduler": diffusers.PNDMScheduler(prediction_type="v_prediction")},
        call=lambda: unprompted(num_inference_steps=5),  # the first four are Runge-Kutta steps
    ),
    recipe(
        name="score-sde-ve",
        pipeline="ScoreSdeVePipeline",
        parts=lambda: {"unet": denoiser(), "scheduler": diffusers.ScoreSdeVeScheduler(sigma_max=2.0)},
        call=unprompted,
    ),
    recipe(
        name="karras-ve",
        pipeline="KarrasVePipeline",
        parts=lambda: {"unet": denoiser(), "scheduler": diffusers.KarrasVeScheduler(sigma_max=2.0)},
        call=unprompted,
    ),
    recipe(name="latent-diffusion", pipeline="LDMPipeline", parts=latent_diffusion, call=unprompted),
    recipe(
        name="latent-diffusion-super-resolution",
        pipeline="LDMSuperResolutionPipeline",
        parts=super_resolution,
        call=lambda: unprompted(image=make_image(32)),
    ),
    recipe(
        name="repaint",
        pipeline="RePaintPipeline",
        parts=lambda: {"unet": denoiser(), "scheduler": diffusers.RePaintScheduler()},
        # The pipeline rounds image sizes to multiples of 32.
        call=lambda: unprompted(image=make_image(32), mask_image=mask(32), jump_length=1, jump_n_sample=2),
    ),
    recipe(name="dance-diffusion", pipeline="DanceDiffusionPipeline", parts=dance_diffusion, call=call_dance),
    recipe(
        name="ddpm",
        pipeline="DDPMPipeline",
        parts=lambda: {"unet": denoiser(), "scheduler": diffusers.DDPMScheduler()},
        call=unprompted,
    ),
    recipe(
        name="ddim",
        pipeline="DDIMPipeline",
        parts=lambda: {"unet": denoiser(), "scheduler": diffusers.DDIMScheduler()},
        call=unprompted,
    ),
    recipe(
        name="consistency-model",
        pipeline="ConsistencyModelPipeline",
        parts=consistency,
        call=lambda: unprompted(class_labels=3),
    ),
    recipe(name="dit", pipeline="DiTPipeline", parts=dit, call=lambda: unprompted(class_labels=[3])),
)
