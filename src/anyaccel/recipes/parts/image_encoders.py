"""Tiny image encoders and their image processors."""

from __future__ import annotations

from typing import Any

from anyaccel.recipes.lazy_modules import transformers

__all__ = [
    "IMAGE_WIDTH",
    "clip_image_processor",
    "clip_vision",
    "clip_vision_config",
    "clip_vision_model",
    "siglip_2_image_processor",
    "siglip_2_vision",
    "siglip_image_processor",
    "siglip_vision",
    "siglip_vision_config",
]

# Hidden size of the encoders, and side of their input in pixels: 2 x 2 patches of 16 pixels.
IMAGE_WIDTH = 32
IMAGE_SIZE = 32


def clip_vision_config(**more: Any) -> Any:
    """Return the configuration for a tiny CLIP image encoder with two layers of width 32."""
    return transformers.CLIPVisionConfig(
        **{
            "hidden_size": IMAGE_WIDTH,
            # A prime, as in the tests of transformers: no tile size of a kernel divides it.
            "intermediate_size": 37,
            "projection_dim": IMAGE_WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": IMAGE_SIZE,
            "patch_size": 16,
        }
        | more
    )


def clip_vision(**more: Any) -> Any:
    """Return a tiny CLIP image encoder with a projection layer."""
    return transformers.CLIPVisionModelWithProjection(clip_vision_config(**more))


def clip_vision_model(**more: Any) -> Any:
    """Return a tiny CLIP image encoder without a projection layer, for pipelines that use hidden states."""
    return transformers.CLIPVisionModel(clip_vision_config(**more))


def clip_image_processor(size: int = IMAGE_SIZE) -> Any:
    """Return a CLIP image processor that resizes and crops images to `size` x `size` pixels."""
    # The default size is 224 pixels, which the tiny encoder does not accept.
    return transformers.CLIPImageProcessor(size={"shortest_edge": size}, crop_size={"height": size, "width": size})


def siglip_vision_config(**more: Any) -> Any:
    """Return the configuration for a tiny SigLIP image encoder with two layers of width 32."""
    return transformers.SiglipVisionConfig(
        **{
            "hidden_size": IMAGE_WIDTH,
            "intermediate_size": 37,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": IMAGE_SIZE,
            "patch_size": 16,
        }
        | more
    )


def siglip_vision(**more: Any) -> Any:
    """Return a tiny SigLIP image encoder."""
    return transformers.SiglipVisionModel(siglip_vision_config(**more))


def siglip_image_processor(size: int = IMAGE_SIZE) -> Any:
    """Return a SigLIP image processor that resizes images to `size` x `size` pixels."""
    return transformers.SiglipImageProcessor(size={"height": size, "width": size})


def siglip_2_vision() -> Any:
    """Return a tiny SigLIP 2 image encoder with two layers of width 32, which accepts any aspect ratio."""
    return transformers.Siglip2VisionModel(
        transformers.Siglip2VisionConfig(
            hidden_size=IMAGE_WIDTH,
            intermediate_size=37,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_patches=(IMAGE_SIZE // 16) ** 2,
            patch_size=16,
        )
    )


def siglip_2_image_processor() -> Any:
    """Return a SigLIP 2 image processor that splits images into at most 2 x 2 patches of 16 pixels."""
    return transformers.Siglip2ImageProcessor(patch_size=16, max_num_patches=(IMAGE_SIZE // 16) ** 2)
