"""Tiny processors that prepare prompts and images for vision-language models."""

from __future__ import annotations

from typing import Any

from anyaccel.recipes.lazy_modules import transformers
from anyaccel.recipes.parts.tokenizers import qwen_tokenizer

__all__ = ["qwen_2_vl_processor", "qwen_3_vl_processor"]


def _without_video(processor: type) -> Any:
    """Return a subclass of a transformers processor that does not require a video processor."""

    # The video processors of transformers require torchvision, which is not a dependency of anyaccel. transformers
    # reads the required parts from the names of the constructor arguments, so without this argument it needs none.
    class ImageAndTextProcessor(processor):  # type: ignore[misc]
        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
            super().__init__(image_processor, tokenizer, None, chat_template=chat_template)

    return ImageAndTextProcessor


def _qwen_processor(processor: type, *, patch_size: int) -> Any:
    # Every image becomes 2 x 2 tokens, and one token covers 2 x 2 patches.
    pixels = (4 * patch_size) ** 2
    tokenizer = qwen_tokenizer()
    return _without_video(processor)(
        # The default image processor requires torchvision too.
        transformers.Qwen2VLImageProcessorPil(
            size={"shortest_edge": pixels, "longest_edge": pixels}, patch_size=patch_size
        ),
        tokenizer,
        chat_template=tokenizer.chat_template,
    )


def qwen_2_vl_processor() -> Any:
    """Return a Qwen2-VL processor for images and text, which Qwen2.5-VL uses too."""
    return _qwen_processor(transformers.Qwen2VLProcessor, patch_size=14)


def qwen_3_vl_processor() -> Any:
    """Return a Qwen3-VL processor for images and text."""
    return _qwen_processor(transformers.Qwen3VLProcessor, patch_size=16)
