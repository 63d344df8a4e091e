"""Recipes for tiny pipelines based on Stable Diffusion.

They cover InstructPix2Pix, upscaling, depth-to-image, image variation, panoramas, LDM3D and other
guidance methods.
"""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families.stable_diffusion import denoiser, parts, scheduler
from anyaccel.recipes.lazy_modules import diffusers, transformers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import make_image, prompted, unprompted
from anyaccel.recipes.parts.image_encoders import clip_image_processor, clip_vision
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16

recipe = functools.partial(make_recipe, family="stable-diffusion")


def without(base: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return a copy of `base` without the named components, which a pipeline does not accept."""
    return {name: part for name, part in base.items() if name not in names}


def upscaler() -> dict[str, Any]:
    """Return the components of a tiny upscaling pipeline.

    The UNet also receives the low-resolution image and its noise level.
    """
    base = parts(
        vae=autoencoder_kl(scaling_factor=0.08333),
        unet=denoiser(in_channels=7, num_class_embeds=1000),
        scheduler=diffusers.DDIMScheduler(**scheduler(prediction_type="v_prediction", clip_sample=False)),
        low_res_scheduler=diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2"),
        max_noise_level=350,
    )
    return without(base, "requires_safety_checker")


def latent_upscaler() -> dict[str, Any]:
    """Return the components of a tiny latent upscaling pipeline.

    The UNet uses `KCrossAttnDownBlock2D` and similar block types.
    """
    unet = diffusers.UNet2DConditionModel(
        act_fn="gelu",
        attention_head_dim=4,
        norm_num_groups=None,
        block_out_channels=(32, 32, 64, 64),  # the upper half must be as wide as the time embedding
        time_cond_proj_dim=160,
        conv_in_kernel=1,
        conv_out_kernel=1,
        cross_attention_dim=TEXT_WIDTH,
        down_block_types=("KDownBlock2D", *("KCrossAttnDownBlock2D",) * 3),
        in_channels=8,
        mid_block_type=None,
        only_cross_attention=False,
        out_channels=5,
        resnet_time_scale_shift="scale_shift",
        time_embedding_type="fourier",
        timestep_post_act="gelu",
        up_block_types=(*("KCrossAttnUpBlock2D",) * 3, "KUpBlock2D"),
    )
    base = parts(unet=unet, scheduler=diffusers.EulerDiscreteScheduler(prediction_type="sample"))
    return without(base, "safety_checker", "feature_extractor", "requires_safety_checker")


def depth_estimator() -> Any:
    """Return a tiny DPT depth estimator without a convolutional backbone."""
    return transformers.DPTForDepthEstimation(
        transformers.DPTConfig(
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=37,
            image_size=32,
            patch_size=16,
            backbone_out_indices=[0, 1, 2, 3],
            neck_hidden_sizes=[8, 8, 8, 8],
            fusion_hidden_size=8,
            is_hybrid=False,
        )
    )


def by_depth() -> dict[str, Any]:
    """Return the components of a tiny depth-to-image pipeline; the UNet also receives a depth map."""
    size = {"height": 32, "width": 32}
    base = parts(
        unet=denoiser(in_channels=5),
        depth_estimator=depth_estimator(),
        feature_extractor=transformers.DPTImageProcessor(size=size),
    )
    return without(base, "safety_checker", "requires_safety_checker")


def variation() -> dict[str, Any]:
    """Return the components of a tiny image variation pipeline.

    It is conditioned on an image embedding instead of a prompt.
    """
    base = parts(image_encoder=clip_vision(), feature_extractor=clip_image_processor())
    return without(base, "text_encoder", "tokenizer")


RECIPES = (
    recipe(
        name="instruct-pix2pix",
        pipeline="StableDiffusionInstructPix2PixPipeline",
        parts=lambda: parts(unet=denoiser(in_channels=8)),
        call=lambda: prompted(image=make_image(SIZE), image_guidance_scale=1.5),
    ),
    recipe(
        name="stable-diffusion-upscale",
        pipeline="StableDiffusionUpscalePipeline",
        parts=upscaler,
        call=lambda: prompted(image=make_image(SIZE), noise_level=20),
    ),
    recipe(
        name="stable-diffusion-latent-upscale",
        pipeline="StableDiffusionLatentUpscalePipeline",
        parts=latent_upscaler,
        call=lambda: prompted(image=make_image(64)),
    ),
    recipe(
        name="stable-diffusion-depth-to-image",
        pipeline="StableDiffusionDepth2ImgPipeline",
        parts=by_depth,
        call=lambda: prompted(image=make_image(SIZE), strength=0.5, num_inference_steps=4),
    ),
    recipe(
        name="stable-diffusion-image-variation",
        pipeline="StableDiffusionImageVariationPipeline",
        parts=variation,
        call=lambda: unprompted(image=make_image(SIZE), height=SIZE, width=SIZE, guidance_scale=5.0),
    ),
    recipe(
        name="stable-diffusion-panorama",
        pipeline="StableDiffusionPanoramaPipeline",
        parts=lambda: parts(scheduler=diffusers.DDIMScheduler(**scheduler(clip_sample=False))),
        call=lambda: prompted(height=SIZE, width=2 * SIZE),
    ),
    recipe(
        name="stable-diffusion-self-attention-guidance",
        pipeline="StableDiffusionSAGPipeline",
        parts=lambda: parts(scheduler=diffusers.DDIMScheduler(**scheduler(clip_sample=False))),
        call=lambda: prompted(height=SIZE, width=SIZE, sag_scale=0.75),
    ),
    recipe(
        name="semantic-guidance",
        pipeline="SemanticStableDiffusionPipeline",
        parts=parts,
        call=lambda: prompted(height=SIZE, width=SIZE, editing_prompt=["blue"], edit_warmup_steps=0),
    ),
    recipe(
        name="stable-diffusion-ldm3d",
        pipeline="StableDiffusionLDM3DPipeline",
        parts=lambda: parts(vae=autoencoder_kl(in_channels=6, out_channels=6), image_encoder=None),
        call=lambda: prompted(height=SIZE, width=SIZE),
    ),
)
