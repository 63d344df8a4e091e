"""The drop-ins: what diffusers loads, portable."""

from __future__ import annotations

from typing import Any

import diffusers

from anyaccel.runtime.pipeline import Portable, make_portable

__all__ = ["DiffusionPipeline"]


class DiffusionPipeline(Portable, diffusers.DiffusionPipeline):  # type: ignore[misc]
    """`diffusers.DiffusionPipeline` whose pipelines are portable."""

    @classmethod
    def from_pretrained(cls, model: Any, **kwargs: Any) -> Any:
        """Load a pipeline."""
        plain: Any = vars(cls).get("_plain_class", diffusers.DiffusionPipeline)
        return make_portable(plain.from_pretrained(model, **kwargs))


class AutoPipelineForText2Image(diffusers.AutoPipelineForText2Image): ...
class AutoPipelineForImage2Image(diffusers.AutoPipelineForImage2Image): ...
class AutoPipelineForInpainting(diffusers.AutoPipelineForInpainting): ...
