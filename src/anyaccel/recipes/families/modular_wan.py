"""Recipes for tiny modular Wan pipelines: text-to-video, image-to-video and VACE."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families import wan
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import embedding, make_image, make_video, unprompted
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES", "call", "parts"]

recipe = functools.partial(make_recipe, family="wan")


def parts(blocks: str, **more: Any) -> dict[str, Any]:
    """Return the components of a tiny modular Wan pipeline with the given blocks, without the one for text.

    That block cleans prompts with ftfy, which is not a dependency of anyaccel.
    """
    made = getattr(diffusers, blocks)()
    del made.sub_blocks["text_encoder"]
    components = wan.parts(blocks=made, **more)
    return {name: part for name, part in components.items() if name not in ("text_encoder", "tokenizer")}


def parts_of_two_experts(blocks: str = "Wan22Blocks", **shape: Any) -> dict[str, Any]:
    """Return the components of a tiny modular Wan 2.2 pipeline.

    It has separate transformers for high-noise and low-noise steps.
    """
    experts = {
        name: diffusers.WanTransformer3DModel(**wan.transformer_shape(**shape))
        for name in ("transformer", "transformer_2")
    }
    return parts(blocks, **experts)


def parts_for_images() -> dict[str, Any]:
    """Return the components of a tiny modular Wan 2.1 pipeline for image-to-video, with an image encoder."""
    from_images = wan.parts_for_images()
    names = ("transformer", "image_encoder", "image_processor")
    return parts("WanImage2VideoAutoBlocks", **{name: from_images[name] for name in names})


def parts_of_vace() -> dict[str, Any]:
    """Return the components of a tiny modular Wan 2.2 VACE pipeline."""
    experts = {name: wan.parts_of_vace()["transformer"] for name in ("transformer", "transformer_2")}
    return parts("Wan22VaceBlocks", **experts)


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for a five-frame video, with prompt embeddings."""
    return (
        unprompted(
            output="videos",
            prompt_embeds=embedding(1, 32, TEXT_WIDTH),
            negative_prompt_embeds=embedding(1, 32, TEXT_WIDTH, seed=4),
            height=wan.SIZE,
            width=wan.SIZE,
            num_frames=wan.FRAMES,
        )
        | more
    )


RECIPES = (
    recipe(name="wan-modular", pipeline="WanModularPipeline", parts=lambda: parts("WanBlocks"), call=call),
    recipe(
        name="wan-image-to-video-modular",
        pipeline="WanImage2VideoModularPipeline",
        parts=parts_for_images,
        call=lambda: call(image=make_image(wan.SIZE)),
    ),
    recipe(name="wan-2-2-modular", pipeline="Wan22ModularPipeline", parts=parts_of_two_experts, call=call),
    recipe(
        name="wan-2-2-image-to-video-modular",
        pipeline="Wan22Image2VideoModularPipeline",
        parts=lambda: parts_of_two_experts("Wan22Image2VideoBlocks", in_channels=2 * wan.CHANNELS + wan.TIME_SCALE),
        call=lambda: call(image=make_image(wan.SIZE)),
    ),
    recipe(
        name="wan-2-2-vace-modular",
        pipeline="Wan22VaceModularPipeline",
        parts=parts_of_vace,
        call=lambda: call(video=make_video(wan.FRAMES, wan.SIZE)),
    ),
)
