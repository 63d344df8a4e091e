"""Replacements for the auto pipelines of diffusers, which choose the pipeline class for a model and a task."""

from __future__ import annotations

from typing import Any

import diffusers

from anyaccel.errors import UsageError
from anyaccel.runtime.pipeline import derive_portable, load_portable

__all__ = ["AutoPipelineForImage2Image", "AutoPipelineForInpainting", "AutoPipelineForText2Image"]


class _AutoPipeline:
    """Base class for auto pipelines, which choose the pipeline class for a model and a task."""

    def __init__(self) -> None:
        raise UsageError(
            f"{type(self).__name__} cannot be instantiated directly",
            hint=f"use {type(self).__name__}.from_pretrained(model)",
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_or_path: Any, **options: Any) -> Any:
        """Load the pipeline for this task from a Hub ID or a local folder."""
        return load_portable(getattr(diffusers, cls.__name__), pretrained_model_or_path, options)

    @classmethod
    def from_pipe(cls, pipeline: Any, **options: Any) -> Any:
        """Create the pipeline for this task from the components of another one, on the same device."""
        return derive_portable(getattr(diffusers, cls.__name__), pipeline, options)


class AutoPipelineForText2Image(_AutoPipeline):
    """A variant of `diffusers.AutoPipelineForText2Image` that supports every device."""


class AutoPipelineForImage2Image(_AutoPipeline):
    """A variant of `diffusers.AutoPipelineForImage2Image` that supports every device."""


class AutoPipelineForInpainting(_AutoPipeline):
    """A variant of `diffusers.AutoPipelineForInpainting` that supports every device."""
