"""What a job asks for, read and checked: it is kept as JSON, and goes to the worker as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["SUFFIXES", "JobSpec", "Task", "read_job_spec"]

Task = Literal["generate", "edit", "inpaint"]
SUFFIXES = {"png": ".png", "jpeg": ".jpg", "webp": ".webp"}


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The pictures of one job."""

    task: Task
    model: str
    prompt: str
    seeds: tuple[int, ...]
    """One a picture."""
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
        """As JSON keeps it."""
        return {**asdict(self), "seeds": list(self.seeds)}

    def call(self) -> dict[str, Any]:
        """The arguments of the pipeline's call beside the prompt, the seed and the pictures that came along."""
        named = ("negative_prompt", "num_inference_steps", "guidance_scale", "strength")
        return {name: value for name in named if (value := getattr(self, name)) is not None}


def read_job_spec(kept: Mapping[str, Any]) -> JobSpec:
    """What was kept."""
    return JobSpec(**{**kept, "seeds": tuple(kept["seeds"])})
