"""Job specification, stored as JSON and sent to the worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["SUFFIXES", "JobSpec", "Task", "read_job_spec"]

Task = Literal["generate", "edit", "inpaint"]
SUFFIXES = {"png": ".png", "jpeg": ".jpg", "webp": ".webp"}


# The field names are JSON keys in the job database: renaming one breaks the jobs stored there.
@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """Validated parameters of a job, including default values."""

    task: Task
    model: str
    prompt: str
    seeds: tuple[int, ...]
    """One seed per image."""
    width: int
    height: int
    negative_prompt: str | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    strength: float | None = None
    lora: str | None = None
    lora_scale: float = 1.0
    partial_images: int = 0
    output_format: str = "png"
    output_compression: int = 95

    def to_dict(self) -> dict[str, Any]:
        """Return the job spec as a JSON-serializable dict."""
        return {**asdict(self), "seeds": list(self.seeds)}

    def pipeline_kwargs(self) -> dict[str, Any]:
        """Return the pipeline arguments, excluding the prompt, seed, size and input images."""
        names = ("negative_prompt", "num_inference_steps", "guidance_scale", "strength")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def read_job_spec(values: Mapping[str, Any]) -> JobSpec:
    """Create a job spec from the output of `JobSpec.to_dict`."""
    return JobSpec(**{**values, "seeds": tuple(values["seeds"])})
