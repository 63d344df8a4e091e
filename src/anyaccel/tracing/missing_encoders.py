"""Text and image encoders without a config file, which tiny encoders replace in a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelError

__all__ = ["MissingConfig", "find_output_widths"]

# Attributes of an encoder's config that are widths of its outputs.
_WIDTHS = ("hidden_size", "d_model", "projection_dim")
# Parts of the names of a denoiser's settings that are the width of an encoder's output, best match first.
_SETTINGS = ("text", "caption", "cap_feat", "joint_attention", "cross_attention", "pooled", "image_dim", "image_embed")


@dataclass(frozen=True)
class MissingConfig:
    """A text or image encoder of a pipeline whose config file is missing."""

    name: str
    """`text_encoder_2`."""
    kind: str
    """Its class; that of the recipe's tiny model if the index does not list the encoder."""
    folder: Path

    @property
    def reason(self) -> str:
        """Why the encoder is not included in the forecast."""
        return f"{self.folder} has no config.json"

    def make_error(self, pipeline: str) -> ModelError:
        """Return the error for a pipeline that cannot be traced without the config file."""
        return ModelError(
            f"{pipeline} requires {self.name}, but {self.reason}",
            hint="download all config files of the model again",
        )


def find_output_widths(tiny: Any, tiny_models: Mapping[str, Any], models: Mapping[str, Any]) -> dict[int, int]:
    """Return the output widths of the encoder that `tiny` replaces, by the output widths of `tiny`.

    They come from the other models: a setting that has the width of `tiny` in the config of a tiny model, such as
    `text_dim`, has the width of the encoder in the config of the full-size model.
    """
    config = getattr(tiny.config, "text_config", tiny.config)
    widths = [getattr(config, name, None) for name in _WIDTHS]
    pairs = [pair for name in models if name in tiny_models for pair in _pair_settings(tiny_models[name], models[name])]
    found: dict[int, int] = {}
    for part in _SETTINGS:
        for setting, tiny_value, value in pairs:
            if part in setting and tiny_value in widths:
                found.setdefault(tiny_value, value)
    return found


def _pair_settings(tiny: Any, model: Any) -> Iterator[tuple[str, int, int]]:
    """Yield the integer settings of a tiny and of a full-size model: the name and both values."""
    settings, tiny_settings = _read_settings(model), _read_settings(tiny)
    for name, value in settings.items():
        if isinstance(value, int) and isinstance(tiny_settings.get(name), int):
            yield name, tiny_settings[name], value


def _read_settings(model: Any) -> Mapping[str, Any]:
    config = getattr(model, "config", None)
    return config if isinstance(config, Mapping) else {}
