"""Where the embedded model lies, and how it is best called."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

from anyaccel.errors import ModelError

__all__ = ["CALL_DEFAULTS", "NAME", "find_embedded_model"]

NAME = "embedded"
"""What `--model` calls it, and what a picture's metadata says."""

CALL_DEFAULTS = MappingProxyType({"num_inference_steps": 8, "guidance_scale": 2.0})
"""What its figures were measured with; a pipeline's own defaults are meant for models a hundred times its size."""

_FOLDER = Path(__file__).parent / "weights"


def find_embedded_model() -> Path:
    """The folder, for `diffusers.DiffusionPipeline.from_pretrained`."""
    if not (_FOLDER / "model_index.json").is_file():
        raise ModelError(
            f"the embedded model is not at {_FOLDER}",
            hint="reinstall anyaccel; a folder or a hub id can be given as the model instead",
        )
    return _FOLDER
