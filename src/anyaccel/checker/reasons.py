"""Why some pipelines do not work on a device even when they are placed: known, and told beside the result."""

from __future__ import annotations

__all__ = ["REASONS", "find_reason"]

_OTHER_UPSCALING = (
    "diffusers itself enlarges the picture in another way there (pipeline_unclip.py, by the device's name)"
)

REASONS: dict[tuple[str, str], str] = {
    (
        "attend-and-excite",
        "*",
    ): "asks for gradients as it denoises, which virtual devices do not give through attention",
    ("semantic-guidance", "*"): "writes its estimates to tensors of the host at every step, for the caller to read",
    ("score-sde-ve", "*"): "its scheduler makes a timestep on the device and looks it up on the host at every step",
    ("unclip", "mps"): _OTHER_UPSCALING,
    ("unclip-image-variation", "mps"): _OTHER_UPSCALING,
}
"""By recipe and device; `*` means every device."""


def find_reason(recipe: str, device: str) -> str:
    """Why a recipe cannot work there, as far as it is known; empty where it should."""
    return REASONS.get((recipe, "*")) or REASONS.get((recipe, device)) or ""
