"""Tiny processors that prepare prompts and images for vision-language models."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.lazy_modules import transformers
from anyaccel.recipes.parts.tokenizers import qwen_tokenizer

__all__ = ["qwen_2_vl_processor", "qwen_3_vl_processor"]


_SUFFIX = "WithoutVideo"


def __getattr__(name: str) -> Any:
    """Return the class with this name, for diffusers, which loads the component of a saved pipeline by name.

    It looks up the base class, which has the methods for loading, in the same module.
    """
    if name == "ProcessorMixin":
        return transformers.ProcessorMixin
    base = getattr(transformers, name.removesuffix(_SUFFIX), None) if name.endswith(f"Processor{_SUFFIX}") else None
    if base is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _without_video(base)


@functools.cache
def _without_video(processor: Any) -> Any:
    """Return a subclass of a transformers processor that does not require a video processor."""

    # The video processors of transformers require torchvision, which is not a dependency of anyaccel. transformers
    # reads the required parts from the names of the constructor arguments, so without this argument it needs none.
    class WithoutVideo(processor):  # type: ignore[misc] # a dynamic base class
        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
            super().__init__(image_processor, tokenizer, None, chat_template=chat_template)

    WithoutVideo.__name__ = WithoutVideo.__qualname__ = processor.__name__ + _SUFFIX
    return WithoutVideo


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
