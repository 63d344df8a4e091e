"""Why some pipelines do not work everywhere even when they are placed: known, and told beside the result."""

from __future__ import annotations

__all__ = ["REASONS", "find_reason"]

_OTHER_UPSCALING = "diffusers itself enlarges the picture in another way there, by its name (pipeline_unclip.py)"

REASONS: dict[str, str] = {
    "attend-and-excite": "asks for gradients as it denoises, which virtual devices do not give through attention",
    "semantic-guidance": "writes its estimates to tensors of the host at every step, for the caller to read",
    "score-sde-ve": "its scheduler makes a timestep on the device and looks it up on the host at every step",
    "unclip": _OTHER_UPSCALING,
    "unclip-image-variation": _OTHER_UPSCALING,
}
"""By recipe."""


def find_reason(recipe: str) -> str:
    """Why a recipe does not work where it does not, as far as it is known; empty where it should."""
    return REASONS.get(recipe, "")
