"""Job specification, stored as JSON and sent to the worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from anyaccel.media.types import Kind

__all__ = ["INPUT_MARK", "SUFFIXES", "JobSpec", "Task", "read_job_spec"]

Task = Literal["generate", "edit", "inpaint"]
INPUT_MARK = ".input."
"""Part of the names of result files that contain an input of a video, as in `0.input.image`."""
SUFFIXES = {
    "png": ".png", "jpeg": ".jpg", "webp": ".webp", "mp4": ".mp4", "webm": ".webm", "gif": ".gif", "wav": ".wav",
    "flac": ".flac",
}  # fmt: skip
"""File suffix of each output format."""


# The field names are JSON keys in the job database: renaming one breaks the jobs stored there. A new field needs a
# default value, which jobs of older versions get.
@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """Validated parameters of a job, including default values."""

    task: Task
    model: str
    prompt: str
    seeds: tuple[int, ...]
    """One seed per image, or the seed of the video or audio."""
    width: int = 0
    height: int = 0
    """0 for audio."""
    negative_prompt: str | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    strength: float | None = None
    lora: str | None = None
    lora_scale: float = 1.0
    partial_images: int = 0
    output_format: str = "png"
    output_compression: int = 95
    kind: Kind = "image"
    num_frames: int | None = None
    fps: float | None = None
    """Frame rate of a video."""
    seconds: float | None = None
    """Length of a video or audio."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the pipeline: JSON values."""
    remixed_from: str | None = None
    """ID of the job whose video this one changes."""
    speed: str | None = None
    """Speed level; None for the default one of the service."""

    def to_dict(self) -> dict[str, Any]:
        """Return the job spec as a JSON-serializable dict."""
        return {**asdict(self), "seeds": list(self.seeds)}

    def pipeline_kwargs(self) -> dict[str, Any]:
        """Return the pipeline arguments, excluding the prompt, seed, size, length and inputs."""
        names = ("negative_prompt", "num_inference_steps", "guidance_scale", "strength")
        values = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {**self.arguments, **values}


def read_job_spec(values: Mapping[str, Any]) -> JobSpec:
    """Create a job spec from the output of `JobSpec.to_dict`, also of an earlier version."""
    return JobSpec(**{**values, "seeds": tuple(values["seeds"])})
