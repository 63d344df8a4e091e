"""The classes of diffusers' auto pipelines for each task (pipelines/auto_pipeline.py in diffusers 0.42.1)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Literal

__all__ = ["Task", "find_task_class"]

Task = Literal["text-to-image", "image-to-image", "inpainting", "text-to-video", "image-to-video", "video-to-video"]

_MAPPINGS: Mapping[Task, str] = {
    "text-to-image": "AUTO_TEXT2IMAGE_PIPELINES_MAPPING",
    "image-to-image": "AUTO_IMAGE2IMAGE_PIPELINES_MAPPING",
    "inpainting": "AUTO_INPAINT_PIPELINES_MAPPING",
    "text-to-video": "AUTO_TEXT2VIDEO_PIPELINES_MAPPING",
    "image-to-video": "AUTO_IMAGE2VIDEO_PIPELINES_MAPPING",
    "video-to-video": "AUTO_VIDEO2VIDEO_PIPELINES_MAPPING",
}


def find_task_class(pipeline: str, task: Task, *, controlnet: bool = False) -> type | None:
    """Return the class for a task and the model of a pipeline class, or None if diffusers has none.

    With `controlnet`, the class has a ControlNet.
    """
    module: Any = importlib.import_module("diffusers.pipelines.auto_pipeline")
    # Versions before 0.42 have no mappings for videos.
    mappings = {name: getattr(module, attribute, {}) for name, attribute in _MAPPINGS.items()}
    models = [model for mapping in mappings.values() for model, kind in mapping.items() if kind.__name__ == pipeline]
    for model in models:
        names = [f"{model}-controlnet"] if controlnet and "controlnet" not in model else [model]
        found = next((mappings[task][name] for name in names if name in mappings[task]), None)
        if found is not None:
            return found  # type: ignore[no-any-return]
    return None
