"""Known reasons why some pipelines do not work on every virtual device, even when placed by anyaccel."""

from __future__ import annotations

__all__ = ["REASONS", "find_reason"]

_GUIDANCE_ON_CPU = "copies its guidance estimates to CPU tensors at every step, as part of its API"
_FLOAT64_GUIDER = "its guider computes in float64, on the CPU for MPS and NPU (adaptive_projected_guidance.py)"
# diffusers selects the interpolation mode by device type, so the reference and the device run different code.
_OTHER_UPSCALING = "diffusers selects another interpolation mode on MPS (pipeline_unclip.py)"

# Reason by recipe name.
REASONS: dict[str, str] = {
    "attend-and-excite": "computes gradients while denoising; virtual devices have no gradients through attention",
    "semantic-guidance": _GUIDANCE_ON_CPU,
    "ledits-pp-stable-diffusion": f"{_GUIDANCE_ON_CPU}; on Neuron, invert() looks up timesteps on the device",
    "ledits-pp-stable-diffusion-xl": f"{_GUIDANCE_ON_CPU}; on Neuron, invert() looks up timesteps on the device",
    "motif-video": _FLOAT64_GUIDER,
    "motif-video-image-to-video": _FLOAT64_GUIDER,
    "ltx-2-5-modular": "computes frequencies of its rotary embedding in float64 (transformer_ltx2.py)",
    "unclip": _OTHER_UPSCALING,
    "unclip-image-variation": _OTHER_UPSCALING,
}


def find_reason(recipe: str) -> str:
    """Return the known reason why a recipe fails even with anyaccel, or an empty string."""
    return REASONS.get(recipe, "")
