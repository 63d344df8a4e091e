"""Location and default call arguments of the embedded model."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

from anyaccel.errors import ModelError

__all__ = ["CALL_DEFAULTS", "NAME", "find_embedded_model"]

# Model name for `--model` and in image metadata.
NAME = "embedded"

# Arguments of the published quality measurements. The defaults of StableDiffusionPipeline (50 steps, guidance 7.5) are
# meant for models a hundred times larger.
CALL_DEFAULTS = MappingProxyType({"num_inference_steps": 8, "guidance_scale": 2.0})

_FOLDER = Path(__file__).parent / "weights"


def find_embedded_model() -> Path:
    """Return the folder with the embedded model, for `diffusers.DiffusionPipeline.from_pretrained`."""
    if not (_FOLDER / "model_index.json").is_file():
        raise ModelError(
            f"the embedded model was not found at {_FOLDER}",
            hint="reinstall anyaccel, or pass the Hub ID or folder of a different model",
        )
    return _FOLDER
