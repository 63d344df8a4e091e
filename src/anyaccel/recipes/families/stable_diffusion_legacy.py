"""Recipes for older Stable Diffusion pipelines that diffusers no longer maintains."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from anyaccel.recipes.families.stable_diffusion import denoiser, parts, scheduler
from anyaccel.recipes.families.stable_diffusion_variants import without
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, mask, prompted, unprompted
from anyaccel.recipes.parts.image_encoders import clip_image_processor, clip_vision_config
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16

recipe = functools.partial(make_recipe, family="stable-diffusion")


def with_ddim(**more: Any) -> dict[str, Any]:
    """Return the components of a tiny Stable Diffusion pipeline with a DDIM scheduler.

    Most pipelines in this module require DDIM.
    """
    return parts(scheduler=diffusers.DDIMScheduler(**scheduler(clip_sample=False)), **more)


def paint_by_example() -> dict[str, Any]:
    """Return the components of a tiny Paint by Example pipeline.

    It is conditioned on an example image instead of a prompt.
    """
    home = importlib.import_module("diffusers.pipelines.deprecated.paint_by_example.image_encoder")
    base = parts(
        unet=denoiser(in_channels=9),
        image_encoder=home.PaintByExampleImageEncoder(clip_vision_config(), proj_size=32),
        feature_extractor=clip_image_processor(),
    )
    return without(base, "text_encoder", "tokenizer")


RECIPES = (
    recipe(
        name="paint-by-example",
        pipeline="PaintByExamplePipeline",
        parts=paint_by_example,
        call=lambda: unprompted(
            image=make_image(SIZE),
            mask_image=mask(SIZE),
            example_image=make_image(SIZE, seed=2),
            guidance_scale=5.0,
            height=SIZE,
            width=SIZE,
        ),
    ),
    recipe(
        name="gligen",
        pipeline="StableDiffusionGLIGENPipeline",
        parts=lambda: with_ddim(unet=denoiser(attention_type="gated")),
        call=lambda: prompted(
            height=SIZE,
            width=SIZE,
            gligen_phrases=["a fox"],
            gligen_boxes=[[0.1, 0.1, 0.6, 0.6]],
            gligen_scheduled_sampling_beta=1.0,
        ),
    ),
    recipe(
        name="cycle-diffusion",
        pipeline="CycleDiffusionPipeline",
        parts=lambda: parts(scheduler=diffusers.DDIMScheduler(**scheduler(clip_sample=False, set_alpha_to_one=False))),
        call=lambda: prompted(
            source_prompt="a blue fox", image=make_image(SIZE), strength=0.5, num_inference_steps=4, eta=0.1
        ),
    ),
    recipe(
        name="paradigms",
        pipeline="StableDiffusionParadigmsPipeline",
        parts=lambda: parts(
            scheduler=diffusers.DDIMParallelScheduler(**scheduler(clip_sample=False, timestep_spacing="trailing"))
        ),
        call=lambda: prompted(height=SIZE, width=SIZE, parallel=2),
    ),
    recipe(
        name="model-editing",
        pipeline="StableDiffusionModelEditingPipeline",
        parts=with_ddim,
        call=lambda: prompted(height=SIZE, width=SIZE),
    ),
    recipe(
        name="attend-and-excite",
        pipeline="StableDiffusionAttendAndExcitePipeline",
        parts=with_ddim,
        call=lambda: prompted(
            height=SIZE, width=SIZE, token_indices=[2, 3], max_iter_to_alter=1, thresholds={}, attn_res=(4, 4)
        ),
    ),
)
